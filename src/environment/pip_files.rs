//! pip's configuration files, for users who have configured the package index for pip but not for
//! uv.
//!
//! ```text
//! /etc/xdg/pip/pip.conf  /etc/pip.conf          machine
//! ~/.pip/pip.conf        ~/.config/pip/pip.conf user
//! $PIP_CONFIG_FILE                              named explicitly
//! ```
//!
//! Later files take precedence, and the section `install` takes precedence over `global`, as in
//! pip. Variables take precedence over files. If uv has a configuration file, none of these files
//! is read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The settings that are read, and the equivalent variables.
const READ: [(&str, &str); 5] = [
    ("index-url", "PIP_INDEX_URL"),
    ("extra-index-url", "PIP_EXTRA_INDEX_URL"),
    ("cert", "PIP_CERT"),
    ("trusted-host", "PIP_TRUSTED_HOST"),
    ("proxy", "PIP_PROXY"),
];

/// The relevant sections. The last one takes precedence.
const SECTIONS: [&str; 2] = ["global", "install"];

/// Returns the settings in pip's files, under the names of the equivalent variables. `root` is the
/// directory that contains the machine's files.
pub(super) fn read(
    variables: &BTreeMap<String, String>,
    root: &Path,
) -> BTreeMap<&'static str, String> {
    if has_settings_of_uv(variables, root) {
        return BTreeMap::new();
    }
    let texts: Vec<String> = files(variables, root)
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .collect();
    let mut found = BTreeMap::new();
    for section in SECTIONS {
        for text in &texts {
            found.extend(settings_in(text, section));
        }
    }
    found
}

fn has_settings_of_uv(variables: &BTreeMap<String, String>, root: &Path) -> bool {
    let user = user_settings(variables).map(|folder| folder.join("uv/uv.toml"));
    let machine = ["etc/xdg/uv/uv.toml", "etc/uv/uv.toml"].map(|path| root.join(path));
    value(variables, "UV_CONFIG_FILE").is_some()
        || user.into_iter().chain(machine).any(|path| path.is_file())
}

fn files(variables: &BTreeMap<String, String>, root: &Path) -> Vec<PathBuf> {
    let named = value(variables, "PIP_CONFIG_FILE").map(PathBuf::from);
    if named.as_deref() == Some(Path::new("/dev/null")) {
        // According to pip's manual, `/dev/null` disables all files.
        return Vec::new();
    }
    let machine = ["etc/xdg/pip/pip.conf", "etc/pip.conf"].map(|path| root.join(path));
    let legacy = value(variables, "HOME").map(|home| Path::new(home).join(".pip/pip.conf"));
    let user = user_settings(variables).map(|folder| folder.join("pip/pip.conf"));
    machine
        .into_iter()
        .chain(legacy)
        .chain(user)
        .chain(named)
        .collect()
}

fn user_settings(variables: &BTreeMap<String, String>) -> Option<PathBuf> {
    let own = value(variables, "XDG_CONFIG_HOME").map(PathBuf::from);
    own.or_else(|| value(variables, "HOME").map(|home| Path::new(home).join(".config")))
}

fn value<'a>(variables: &'a BTreeMap<String, String>, name: &str) -> Option<&'a str> {
    variables
        .get(name)
        .map(String::as_str)
        .filter(|value| !value.is_empty())
}

/// Parses one section. A line that begins with a space continues the previous value; multi-line
/// values become words.
fn settings_in(text: &str, section: &str) -> BTreeMap<&'static str, String> {
    let mut found: BTreeMap<&'static str, String> = BTreeMap::new();
    let (mut is_in_section, mut current) = (false, None);
    for line in text.lines() {
        let content = line.trim();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        if line.starts_with([' ', '\t']) {
            if let Some(value) = current.and_then(|name| found.get_mut(name)) {
                *value = format!("{value} {content}").trim().to_owned();
            }
            continue;
        }
        current = None;
        if let Some(name) = content
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            is_in_section = name.trim() == section;
        } else if let Some((key, value)) = content.split_once(['=', ':']).filter(|_| is_in_section)
        {
            let key = key.trim().to_ascii_lowercase().replace('_', "-");
            current = READ
                .iter()
                .find(|(name, _)| *name == key)
                .map(|(_, variable)| *variable);
            found.extend(current.map(|name| (name, value.trim().to_owned())));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A separate file system root with a home directory.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(files: &[(&str, &str)]) -> Machine {
            let machine = Machine(tempfile::tempdir().unwrap());
            for (path, text) in files {
                let path = machine.0.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            machine
        }

        fn read(&self, more: &[(&str, &str)]) -> Vec<(&'static str, String)> {
            let home = self.0.path().join("home").display().to_string();
            let pairs = more.iter().copied().chain([("HOME", home.as_str())]);
            let variables = pairs
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect();
            read(&variables, self.0.path()).into_iter().collect()
        }
    }

    fn index(url: &str) -> Vec<(&'static str, String)> {
        vec![("PIP_INDEX_URL", url.to_owned())]
    }

    #[test]
    fn settings_are_read_as_pip_reads_them() {
        let text = "# ours\n[global]\nindex_url: https://a.example/simple\ntimeout = \
                    60\nextra-index-url =\n    https://b.example/x\n    \
                    ; not this\n    https://c.example/x\ncert = /etc/ca.pem\n[list]\nindex-url = \
                    https://no.example/\n[install]\n\
                    trusted-host = d.example\n";
        let found = Machine::new(&[("etc/pip.conf", text)]).read(&[]);
        let expected = [
            ("PIP_CERT", "/etc/ca.pem"),
            (
                "PIP_EXTRA_INDEX_URL",
                "https://b.example/x https://c.example/x",
            ),
            ("PIP_INDEX_URL", "https://a.example/simple"),
            ("PIP_TRUSTED_HOST", "d.example"),
        ];
        assert_eq!(
            found,
            expected.map(|(name, value)| (name, value.to_owned()))
        );
    }

    #[test]
    fn the_users_file_counts_more_than_the_machines_and_a_named_one_more_than_both() {
        let global = |host: &str| format!("[global]\nindex-url = https://{host}.example/\n");
        let (machine, user, named) = (global("machine"), global("user"), global("named"));
        let files = [
            ("etc/pip.conf", machine.as_str()),
            ("home/.config/pip/pip.conf", &user),
            ("named", &named),
        ];
        let machine = Machine::new(&files);
        assert_eq!(machine.read(&[]), index("https://user.example/"));
        let path = machine.0.path().join("named").display().to_string();
        assert_eq!(
            machine.read(&[("PIP_CONFIG_FILE", &path)]),
            index("https://named.example/")
        );
        assert_eq!(machine.read(&[("PIP_CONFIG_FILE", "/dev/null")]), []);
        assert_eq!(
            machine.read(&[("XDG_CONFIG_HOME", "/nowhere")]),
            index("https://machine.example/")
        );
    }

    #[test]
    fn the_section_for_installing_counts_more_than_the_general_one() {
        let install = (
            "etc/pip.conf",
            "[install]\nindex-url = https://install.example/\n",
        );
        let global = (
            "home/.pip/pip.conf",
            "[global]\nindex-url = https://global.example/\n",
        );
        assert_eq!(
            Machine::new(&[install, global]).read(&[]),
            index("https://install.example/")
        );
        assert_eq!(
            Machine::new(&[global]).read(&[]),
            index("https://global.example/")
        ); // control
    }

    #[test]
    fn a_settings_file_of_uv_is_meant_instead() {
        let pip = (
            "etc/pip.conf",
            "[global]\nindex-url = https://pip.example/\n",
        );
        assert_eq!(
            Machine::new(&[pip]).read(&[]),
            index("https://pip.example/")
        ); // control
        for uv in ["etc/uv/uv.toml", "home/.config/uv/uv.toml"] {
            assert_eq!(Machine::new(&[pip, (uv, "")]).read(&[]), [], "{uv}");
        }
        assert_eq!(Machine::new(&[pip]).read(&[("UV_CONFIG_FILE", "/x")]), []);
    }
}
