//! Names: converts the names of a server into valid Python identifiers that cannot mean something
//! else.
//!
//! Only ASCII letters, digits and underscores are kept. So no two different names look alike, and
//! none changes when Python normalises it (NFKC). The original name is always kept beside the
//! identifier, because it is sent to the server.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

/// Length limit of a server name.
const MAX_SERVER_NAME_LENGTH: usize = 64;
/// Length limit of a generated identifier. A file name may have 255 bytes, and a number and `.py`
/// may follow.
const MAX_IDENTIFIER_LENGTH: usize = 100;

/// The name under which a server is registered: letters, digits, `-`, `_` and `.`, beginning with a
/// letter or digit.
///
/// It cannot point to a folder elsewhere, because the folder is named by [`ServerName::python`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerName {
    original: String,
    python: String,
}

/// Reason why a text is not a valid server name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServerNameError {
    #[error("the name of a server is empty")]
    Empty,
    #[error("the name of a server has {length} characters, and may have {MAX_SERVER_NAME_LENGTH}")]
    TooLong { length: usize },
    #[error(
        "the name of a server holds {character:?}; letters, digits, `-`, `_` and `.` are allowed"
    )]
    Character { character: char },
    #[error("the name of a server begins with {character:?}; a letter or a digit must come first")]
    Beginning { character: char },
}

impl ServerName {
    /// Checks a name. Two different names may have the same Python name; a caller that keeps
    /// several must compare those.
    pub fn new(name: &str) -> Result<ServerName, ServerNameError> {
        let first = name.chars().next().ok_or(ServerNameError::Empty)?;
        let length = name.chars().count();
        if length > MAX_SERVER_NAME_LENGTH {
            return Err(ServerNameError::TooLong { length });
        }
        let is_allowed = |character: &char| {
            character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.')
        };
        if let Some(character) = name.chars().find(|character| !is_allowed(character)) {
            return Err(ServerNameError::Character { character });
        }
        if !first.is_ascii_alphanumeric() {
            return Err(ServerNameError::Beginning { character: first });
        }
        let python = identifier(name, "server");
        let python = if INDEX_NAMES.contains(&python.as_str()) {
            python + "_"
        } else {
            python
        };
        Ok(ServerName {
            original: name.to_owned(),
            python,
        })
    }

    /// Returns the name as given.
    pub fn as_str(&self) -> &str {
        &self.original
    }

    /// Returns the name of the package, `mcptools.<this>`, and of its folder.
    pub fn python(&self) -> &str {
        &self.python
    }
}

impl fmt::Display for ServerName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.original)
    }
}

/// The names that the index `mcptools` exports itself, in import order.
pub(crate) const INDEX_NAMES: [&str; 13] = [
    "Audio",
    "Block",
    "Image",
    "Link",
    "Reply",
    "Resource",
    "Text",
    "ToolCallDenied",
    "ToolCallError",
    "ToolCallTimeout",
    "ToolError",
    "call",
    "call_async",
];

/// Names that annotations in a generated module use, so that no field or class may have them.
pub(crate) const USED_NAMES: [&str; 32] = [
    "Annotated",
    "Any",
    "AwareDatetime",
    "Base64",
    "Email",
    "Field",
    "Literal",
    "Model",
    "Null",
    "OneOf",
    "Params",
    "Pattern",
    "Reply",
    "Result",
    "RootModel",
    "Sent",
    "UUID",
    "Url",
    "annotations",
    "bool",
    "bytes",
    "call",
    "call_async",
    "dict",
    "dt",
    "float",
    "int",
    "list",
    "run",
    "run_async",
    "str",
    "tuple",
];

/// The attributes of a Pydantic model. A field with such a name would hide one. A test compares
/// this list with Pydantic.
const MODEL_NAMES: [&str; 29] = [
    "construct",
    "copy",
    "dict",
    "from_orm",
    "json",
    "model_computed_fields",
    "model_config",
    "model_construct",
    "model_copy",
    "model_dump",
    "model_dump_json",
    "model_extra",
    "model_fields",
    "model_fields_set",
    "model_json_schema",
    "model_parametrized_name",
    "model_post_init",
    "model_rebuild",
    "model_validate",
    "model_validate_json",
    "model_validate_strings",
    "parse_file",
    "parse_obj",
    "parse_raw",
    "schema",
    "schema_json",
    "self",
    "update_forward_refs",
    "validate",
];

/// Python's keywords, including soft keywords.
const KEYWORDS: [&str; 39] = [
    "False", "None", "True", "and", "as", "assert", "async", "await", "break", "case", "class",
    "continue", "def", "del", "elif", "else", "except", "finally", "for", "from", "global", "if",
    "import", "in", "is", "lambda", "match", "nonlocal", "not", "or", "pass", "raise", "return",
    "try", "while", "with", "yield", "print", "exec",
];

/// Returns an identifier for `name`: every other character becomes `_`, a keyword gets a trailing
/// `_`, and a name that begins with a digit or an underscore begins with `kind` instead.
fn identifier(name: &str, kind: &str) -> String {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mapped = name.chars().map(|character| {
        if is_allowed(character) {
            character
        } else {
            '_'
        }
    });
    let mut text: String = mapped.take(MAX_IDENTIFIER_LENGTH).collect();
    if !text.starts_with(|character: char| character.is_ascii_alphabetic()) {
        let rest = text.trim_matches('_');
        text = if rest.is_empty() {
            kind.to_owned()
        } else {
            format!("{kind}_{rest}")
        };
    }
    if KEYWORDS.contains(&text.as_str()) {
        text.push('_');
    }
    text
}

/// Returns the module name of each tool. If several tools have similar names, the order of the
/// tools does not affect which one gets the plain name: it is the tool with exactly this name,
/// otherwise the first in alphabetical order.
pub(crate) fn modules<'a>(tools: &[&'a str]) -> HashMap<&'a str, String> {
    let mut wanted: Vec<(String, &str)> = tools
        .iter()
        .map(|tool| (identifier(tool, "tool").to_ascii_lowercase(), *tool))
        .collect();
    // A name that is not a keyword may become one in lower case.
    for (module, _) in &mut wanted {
        if KEYWORDS.contains(&module.as_str()) {
            module.push('_');
        }
    }
    wanted.sort_by_key(|(module, tool)| (module.clone(), module != tool, *tool));
    wanted.dedup();
    let exact = wanted
        .iter()
        .filter(|(module, tool)| module == tool)
        .map(|(module, _)| module.clone());
    let mut names = NameScope::without(exact);
    let take = |(module, tool): (String, &'a str)| {
        let name = if module == tool {
            module
        } else {
            names.take(&module)
        };
        (tool, name)
    };
    wanted.into_iter().map(take).collect()
}

/// Returns the names of fields, in the order of the properties. `others` are names that mean
/// something else in the same module.
pub(crate) fn fields(properties: &[&str], others: &BTreeSet<String>) -> Vec<String> {
    let is_reserved = |name: &str| {
        MODEL_NAMES.contains(&name) || USED_NAMES.contains(&name) || others.contains(name)
    };
    let wanted = properties.iter().map(|property| {
        let name = identifier(property, "field");
        if is_reserved(&name) { name + "_" } else { name }
    });
    let wanted: Vec<String> = wanted.collect();
    let exact = wanted
        .iter()
        .zip(properties)
        .filter(|(name, property)| name == *property)
        .map(|(name, _)| name.clone());
    let mut names = NameScope::without(exact);
    let name = |(name, property): (String, &&str)| {
        if name == **property {
            name
        } else {
            names.take(&name)
        }
    };
    wanted.into_iter().zip(properties).map(name).collect()
}

/// Returns whether a property can be a field under its own name, whatever else the module contains.
pub(crate) fn is_plain_field(property: &str) -> bool {
    property.starts_with(|character: char| character.is_ascii_lowercase())
        && fields(&[property], &BTreeSet::new()) == [property]
}

/// Returns a class name like `hint`, such as `UserProfile` for `user-profile`.
pub(crate) fn class(hint: &str) -> String {
    let mut text = String::new();
    let words = hint.split(|character: char| !character.is_ascii_alphanumeric());
    for word in words.filter(|word| !word.is_empty()) {
        text.push(word.as_bytes()[0].to_ascii_uppercase().into());
        text.push_str(&word[1..]);
    }
    text.truncate(MAX_IDENTIFIER_LENGTH);
    identifier(&text, "Model")
}

/// Names already taken in one scope.
#[derive(Debug, Clone, Default)]
pub(crate) struct NameScope {
    taken: BTreeSet<String>,
    /// The last number appended to each name.
    numbers: HashMap<String, u32>,
}

impl NameScope {
    pub(crate) fn without(taken: impl IntoIterator<Item = String>) -> NameScope {
        NameScope {
            taken: taken.into_iter().collect(),
            numbers: HashMap::new(),
        }
    }

    pub(crate) fn holds(&self, name: &str) -> bool {
        self.taken.contains(name)
    }

    /// Takes `wanted` or, if it is taken, the first free one of `wanted_2`, `wanted_3` …
    pub(crate) fn take(&mut self, wanted: &str) -> String {
        self.take_numbered(wanted, if wanted.ends_with('_') { "" } else { "_" })
    }

    /// Takes `wanted`, or `Wanted2` …, the numbering of classes.
    pub(crate) fn take_class(&mut self, wanted: &str) -> String {
        self.take_numbered(wanted, "")
    }

    pub(crate) fn into_set(self) -> BTreeSet<String> {
        self.taken
    }

    fn take_numbered(&mut self, wanted: &str, separator: &str) -> String {
        let mut name = wanted.to_owned();
        while !self.taken.insert(name.clone()) {
            let number = self.numbers.entry(wanted.to_owned()).or_insert(1);
            *number += 1;
            name = format!("{wanted}{separator}{number}");
        }
        name
    }
}

/// Returns whether this is a builtin class or function of Python. A class with that name would hide
/// it. A test compares this list with Python.
pub(crate) fn is_builtin(name: &str) -> bool {
    name.ends_with("Error") && BUILTIN_ERRORS.contains(&name)
        || name.ends_with("Warning") && BUILTIN_WARNINGS.contains(&name)
        || OTHER_BUILTINS.contains(&name)
}

const BUILTIN_ERRORS: [&str; 51] = [
    "ArithmeticError",
    "AssertionError",
    "AttributeError",
    "BlockingIOError",
    "BrokenPipeError",
    "BufferError",
    "ChildProcessError",
    "ConnectionAbortedError",
    "ConnectionError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "EOFError",
    "EnvironmentError",
    "FileExistsError",
    "FileNotFoundError",
    "FloatingPointError",
    "IOError",
    "ImportError",
    "IndentationError",
    "IndexError",
    "InterruptedError",
    "IsADirectoryError",
    "KeyError",
    "LookupError",
    "MemoryError",
    "ModuleNotFoundError",
    "NameError",
    "NotADirectoryError",
    "NotImplementedError",
    "OSError",
    "OverflowError",
    "PermissionError",
    "ProcessLookupError",
    "PythonFinalizationError",
    "RecursionError",
    "ReferenceError",
    "RuntimeError",
    "SyntaxError",
    "SystemError",
    "TabError",
    "TimeoutError",
    "TypeError",
    "UnboundLocalError",
    "UnicodeDecodeError",
    "UnicodeEncodeError",
    "UnicodeError",
    "UnicodeTranslateError",
    "ValueError",
    "ZeroDivisionError",
    "ToolError",
    "ToolCallError",
];

const BUILTIN_WARNINGS: [&str; 12] = [
    "BytesWarning",
    "DeprecationWarning",
    "EncodingWarning",
    "FutureWarning",
    "ImportWarning",
    "PendingDeprecationWarning",
    "ResourceWarning",
    "RuntimeWarning",
    "SyntaxWarning",
    "UnicodeWarning",
    "UserWarning",
    "Warning",
];

const OTHER_BUILTINS: [&str; 12] = [
    "BaseException",
    "BaseExceptionGroup",
    "Ellipsis",
    "Exception",
    "ExceptionGroup",
    "GeneratorExit",
    "KeyboardInterrupt",
    "NotImplemented",
    "StopAsyncIteration",
    "StopIteration",
    "SystemExit",
    "WindowsError",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_name_is_never_a_path() {
        for (name, error) in [
            ("", ServerNameError::Empty),
            ("../x", ServerNameError::Character { character: '/' }),
            ("..", ServerNameError::Beginning { character: '.' }),
            (".hidden", ServerNameError::Beginning { character: '.' }),
            ("a/b", ServerNameError::Character { character: '/' }),
            ("a\\b", ServerNameError::Character { character: '\\' }),
            ("a b", ServerNameError::Character { character: ' ' }),
            ("a\0", ServerNameError::Character { character: '\0' }),
            ("ｆｓ", ServerNameError::Character { character: 'ｆ' }),
            ("__init__", ServerNameError::Beginning { character: '_' }),
            (&"x".repeat(65), ServerNameError::TooLong { length: 65 }),
        ] {
            assert_eq!(ServerName::new(name), Err(error), "{name:?}");
        }
    }

    #[test]
    fn a_server_name_becomes_a_package() {
        for (name, python) in [
            ("filesystem", "filesystem"),
            ("My-Server.v2", "My_Server_v2"),
            ("class", "class_"),
            ("1password", "server_1password"),
            ("call", "call_"),
            ("a..b", "a__b"),
        ] {
            assert_eq!(ServerName::new(name).unwrap().python(), python);
        }
    }

    #[test]
    fn tools_with_like_names_have_modules_of_their_own_whatever_their_order() {
        let names = [
            "Get-User", "get.user", "get_user", "CLASS", "class", "1tool", "__init__", "", "-",
            "ﬁle", "None",
        ];
        let modules = modules(&names);
        let expected = [
            ("get_user", "get_user"),
            ("Get-User", "get_user_2"),
            ("get.user", "get_user_3"),
            ("CLASS", "class_"),
            ("class", "class_2"),
            ("1tool", "tool_1tool"),
            ("__init__", "tool_init"),
            ("", "tool"),
            ("-", "tool_2"),
            ("ﬁle", "tool_le"),
            ("None", "none_"),
        ];
        for (tool, module) in expected {
            assert_eq!(modules[tool], module, "{tool:?}");
        }
        let mut backwards = names;
        backwards.reverse();
        assert_eq!(super::modules(&backwards), modules);
    }

    #[test]
    fn fields_keep_the_names_that_they_can_keep() {
        let names = [
            "a-b",
            "a_b",
            "from",
            "_id",
            "list",
            "type",
            "date",
            "model_config",
            "model_name",
            "Row",
        ];
        let others = BTreeSet::from(["Row".to_owned()]);
        let expected = [
            "a_b_2",
            "a_b",
            "from_",
            "field_id",
            "list_",
            "type",
            "date",
            "model_config_",
            "model_name",
            "Row_",
        ];
        assert_eq!(fields(&names, &others), expected);
    }

    #[test]
    fn classes_are_named_in_capitals() {
        let named = [
            ("user-profile", "UserProfile"),
            ("userProfile", "UserProfile"),
            ("3d", "Model_3d"),
            ("", "Model"),
            ("żółw", "W"),
        ];
        for (hint, name) in named {
            assert_eq!(class(hint), name);
        }
    }
}
