//! Finds a Python that can run inside a sandbox.
//!
//! Each candidate is executed, because a file called `python3` may be a shim without a Python
//! behind it. It reports its version, its prefix, and the shared libraries that it has loaded after
//! importing the larger parts of its standard library. `assess` then decides: everything it needs
//! must be below its prefix or in the system directories, because nothing else exists inside.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use tokio::process::Command;

use super::{PYTHON_INSIDE, PythonRequest};

/// A Python that environments can be built on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BasePython {
    /// The real file, below `base_prefix`.
    pub(super) executable: PathBuf,
    /// Such as `3.12.4`.
    pub(super) version: String,
    pub(super) base_prefix: PathBuf,
    /// Directory of its own `libpython`, if the program does not find it by itself when mounted
    /// elsewhere.
    pub(super) library_dir: Option<PathBuf>,
}

impl BasePython {
    /// Returns its minor version, such as `3.12`. Packages are chosen and installed for a minor
    /// version.
    pub(super) fn line(&self) -> String {
        self.version
            .splitn(3, '.')
            .take(2)
            .collect::<Vec<_>>()
            .join(".")
    }

    /// Returns the inside path of a host path below the prefix.
    pub(super) fn inside(&self, host: &Path) -> PathBuf {
        path_inside(&self.base_prefix, host)
    }
}

/// Maps a host path below `base_prefix` to its inside path. System directories keep their paths.
pub(super) fn path_inside(base_prefix: &Path, host: &Path) -> PathBuf {
    match host.strip_prefix(base_prefix) {
        Ok(rest) if !is_system(base_prefix) => below(Path::new(PYTHON_INSIDE), rest),
        _ => host.to_owned(),
    }
}

/// Joins two paths. Unlike `Path::join`, joining with an empty path adds no slash, which Python
/// would show in its own paths.
pub(super) fn below(folder: &Path, rest: &Path) -> PathBuf {
    folder.components().chain(rest.components()).collect()
}

/// Returns whether a path is in a directory that every sandbox mounts read-only.
pub(super) fn is_system(path: &Path) -> bool {
    ["/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin"]
        .iter()
        .any(|folder| path.starts_with(folder))
}

/// Finds an interpreter, preferably one that finds its libraries without help. If none fits,
/// returns the problem of each candidate.
pub(super) async fn find(
    request: &PythonRequest,
    variables: &BTreeMap<String, String>,
) -> Result<BasePython, Vec<String>> {
    let mut second_choice = None;
    let mut refusals = Vec::new();
    let search_path = variables.get("PATH").map_or("", String::as_str);
    for candidate in candidates(request, search_path) {
        match examine(&candidate, request).await {
            Ok(found) if found.library_dir.is_none() => return Ok(found),
            Ok(found) => second_choice = second_choice.or(Some(found)),
            Err(why) => refusals.push(format!("{}: {why}", candidate.display())),
        }
    }
    second_choice.ok_or(refusals)
}

/// Runs a candidate and checks it against the request.
pub(super) async fn examine(
    candidate: &Path,
    request: &PythonRequest,
) -> Result<BasePython, String> {
    let testimony = question(candidate).await?;
    let finds_own_library = std::fs::read(&testimony.executable)
        .map(|program| contains(&program, b"$ORIGIN"))
        .map_err(|error| format!("its program cannot be read: {error}"))?;
    assess(testimony, request, finds_own_library)
}

/// A Python's report about itself.
#[derive(Debug, Clone, Deserialize)]
struct Testimony {
    implementation: String,
    version: String,
    base_prefix: PathBuf,
    executable: PathBuf,
    standard_library: PathBuf,
    libraries: Vec<PathBuf>,
    readable: bool,
}

const QUESTION: &str = r#"
import json, os, sys, sysconfig
for name in ("ssl", "sqlite3", "ctypes", "lzma", "bz2", "zlib", "readline", "decimal", "hashlib", "socket", "uuid"):
    try:
        __import__(name)
    except ImportError:
        pass
libraries = set()
with open("/proc/self/maps") as maps:
    for line in maps:
        words = line.split(None, 5)
        if len(words) == 6 and ".so" in words[5]:
            libraries.add(words[5].strip())
executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
standard_library = os.path.realpath(os.path.dirname(os.__file__))
needed = [executable, standard_library, os.path.join(standard_library, "os.py")]
print(json.dumps({
    "implementation": sys.implementation.name,
    "version": "%d.%d.%d" % sys.version_info[:3],
    "base_prefix": os.path.realpath(sys.base_prefix),
    "executable": executable,
    "standard_library": standard_library,
    "libraries": sorted(libraries),
    "readable": all(os.path.exists(path) and os.stat(path).st_mode & 4 for path in needed),
}))
"#;

/// Timeout for a candidate. An interactive shim or a hanging network drive must not block us.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(30);

async fn question(candidate: &Path) -> Result<Testimony, String> {
    let answer = Command::new(candidate)
        .args(["-I", "-S", "-B", "-c", QUESTION])
        .current_dir("/")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let answer = tokio::time::timeout(MAX_ANSWER_TIME, answer)
        .await
        .map_err(|_| "it did not answer".to_owned())?
        .map_err(|error| format!("it cannot be run: {error}"))?;
    if !answer.status.success() {
        let said = String::from_utf8_lossy(&answer.stderr);
        return Err(format!(
            "it does not work: {}",
            said.lines().next().unwrap_or("it said nothing")
        ));
    }
    serde_json::from_slice(&answer.stdout)
        .map_err(|_| "its answer is not that of a Python from 3.10 on".to_owned())
}

fn assess(
    testimony: Testimony,
    request: &PythonRequest,
    finds_own_library: bool,
) -> Result<BasePython, String> {
    let Testimony {
        implementation,
        version,
        base_prefix,
        executable,
        standard_library,
        libraries,
        readable,
    } = testimony;
    if implementation != "cpython" {
        return Err(format!(
            "it is {implementation}, and only CPython can be used"
        ));
    }
    if !at_least_3_10(&version) {
        return Err(format!(
            "it is Python {version}, and 3.10 is the oldest that can be used"
        ));
    }
    if !request.accepts_version(&version) {
        return Err(format!("it is Python {version}"));
    }
    let shown_inside = |path: &Path| path.starts_with(&base_prefix) || is_system(path);
    if !executable.starts_with(&base_prefix) {
        return Err(format!(
            "its program lies outside of its prefix {}",
            base_prefix.display()
        ));
    }
    if base_prefix == Path::new("/") || !shown_inside(&standard_library) {
        return Err(format!(
            "its standard library lies outside of its prefix {}",
            base_prefix.display()
        ));
    }
    if let Some(outside) = libraries.iter().find(|library| !shown_inside(library)) {
        return Err(format!(
            "it needs {}, which lies outside of its prefix and the system",
            outside.display()
        ));
    }
    if !readable {
        return Err("its files cannot be read by other users, and a sandbox is one".to_owned());
    }
    let own_library = libraries.iter().find(|library| is_libpython(library));
    let library_dir = own_library
        .and_then(|library| library.parent())
        .filter(|folder| !finds_own_library && !is_searched_by_the_loader(folder))
        .map(Path::to_owned);
    Ok(BasePython {
        executable,
        version,
        base_prefix,
        library_dir,
    })
}

fn is_libpython(library: &Path) -> bool {
    library
        .file_name()
        .and_then(OsStr::to_str)
        .is_some_and(|name| name.starts_with("libpython"))
}

/// Returns whether the loader searches a directory by default: `/lib`, `/usr/lib`, and the
/// architecture's directory below.
fn is_searched_by_the_loader(folder: &Path) -> bool {
    ["/lib", "/usr/lib", "/lib64", "/usr/lib64"]
        .iter()
        .any(|base| {
            folder == Path::new(base)
                || folder.parent() == Some(Path::new(base))
                    && folder.to_string_lossy().ends_with("-linux-gnu")
        })
}

fn at_least_3_10(version: &str) -> bool {
    let mut parts = version
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (3, 10)
}

/// Lists candidate files for the requested Python, best first.
fn candidates(request: &PythonRequest, search_path: &str) -> Vec<PathBuf> {
    let names: Vec<String> = match request {
        PythonRequest::Path(path) => return vec![path.clone()],
        PythonRequest::Any | PythonRequest::Range(_) => [
            "python3",
            "python3.14",
            "python3.13",
            "python3.12",
            "python3.11",
            "python3.10",
        ]
        .map(str::to_owned)
        .to_vec(),
        PythonRequest::Version(version) => {
            let line = version.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
            vec![format!("python{line}"), "python3".to_owned()]
        }
    };
    let mut found: Vec<PathBuf> = Vec::new();
    for name in names {
        for folder in search_path
            .split(':')
            .map(Path::new)
            .filter(|folder| folder.is_absolute())
        {
            let candidate = folder.join(&name);
            if candidate.is_file() && !found.contains(&candidate) {
                found.push(candidate);
            }
        }
    }
    found
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack
        .windows(needle.len())
        .any(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn testimony() -> Testimony {
        Testimony {
            implementation: "cpython".to_owned(),
            version: "3.12.4".to_owned(),
            base_prefix: "/opt/py".into(),
            executable: "/opt/py/bin/python3.12".into(),
            standard_library: "/opt/py/lib/python3.12".into(),
            libraries: vec![
                "/opt/py/lib/python3.12/lib-dynload/_ssl.so".into(),
                "/usr/lib/libc.so.6".into(),
            ],
            readable: true,
        }
    }

    fn refusal(change: impl FnOnce(&mut Testimony)) -> String {
        let mut changed = testimony();
        change(&mut changed);
        assess(changed, &PythonRequest::Any, false).expect_err("it should be refused")
    }

    #[test]
    fn a_python_that_has_everything_below_its_prefix_is_taken() {
        let found = assess(testimony(), &PythonRequest::Any, false).unwrap();
        assert_eq!(
            found.inside(&found.executable),
            Path::new("/opt/cellblock/python/bin/python3.12")
        );
        assert_eq!(found.library_dir, None);
    }

    #[test]
    fn a_python_that_cannot_live_inside_is_refused_with_the_reason() {
        assert!(refusal(|said| said.implementation = "pypy".to_owned()).contains("pypy"));
        assert!(refusal(|said| said.version = "3.9.18".to_owned()).contains("3.9.18"));
        assert!(refusal(|said| said.executable = "/elsewhere/python".into()).contains("program"));
        assert!(
            refusal(|said| said.standard_library = "/elsewhere/lib".into())
                .contains("standard library")
        );
        assert!(
            refusal(|said| said.libraries.push("/nix/store/libssl.so".into()))
                .contains("/nix/store/libssl.so")
        );
        assert!(refusal(|said| said.readable = false).contains("other users"));
        assert!(refusal(|said| said.base_prefix = "/".into()).contains("prefix"));
        let other = PythonRequest::Version("3.11".to_owned());
        assert!(
            assess(testimony(), &other, false)
                .unwrap_err()
                .contains("3.12.4")
        );
    }

    #[test]
    fn a_shared_library_of_its_own_needs_a_path_unless_the_program_finds_it() {
        let mut shared = testimony();
        shared
            .libraries
            .push("/opt/py/lib/libpython3.12.so.1.0".into());
        let helped = assess(shared.clone(), &PythonRequest::Any, false).unwrap();
        assert_eq!(
            helped.library_dir.as_deref(),
            Some(Path::new("/opt/py/lib"))
        );
        assert_eq!(
            assess(shared.clone(), &PythonRequest::Any, true)
                .unwrap()
                .library_dir,
            None
        );
        shared.libraries = vec!["/usr/lib/x86_64-linux-gnu/libpython3.12.so.1.0".into()];
        assert_eq!(
            assess(shared, &PythonRequest::Any, false)
                .unwrap()
                .library_dir,
            None
        );
    }

    #[test]
    fn the_prefix_itself_has_no_slash_at_its_end() {
        assert_eq!(
            path_inside(Path::new("/opt/py"), Path::new("/opt/py")).to_str(),
            Some("/opt/cellblock/python")
        );
    }

    #[test]
    fn a_system_python_keeps_its_paths() {
        let host = Path::new("/usr/bin/python3.11");
        assert_eq!(path_inside(Path::new("/usr"), host), host);
        assert_eq!(
            path_inside(Path::new("/usr/local"), Path::new("/usr/local/bin/python3")),
            Path::new("/usr/local/bin/python3")
        );
    }

    #[test]
    fn candidates_are_taken_from_every_folder_of_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("a"), folder.path().join("b"));
        for (place, name) in [
            (&first, "python3"),
            (&second, "python3"),
            (&second, "python3.12"),
            (&second, "python3.9"),
        ] {
            std::fs::create_dir_all(place).unwrap();
            std::fs::write(place.join(name), "").unwrap();
        }
        let path = format!("{}:relative:{}", first.display(), second.display());
        let all = candidates(&PythonRequest::Any, &path);
        assert_eq!(
            all,
            [
                first.join("python3"),
                second.join("python3"),
                second.join("python3.12")
            ]
        );
        let wanted = candidates(&PythonRequest::Version("3.12.1".to_owned()), &path);
        assert_eq!(
            wanted,
            [
                second.join("python3.12"),
                first.join("python3"),
                second.join("python3")
            ]
        );
    }

    #[tokio::test]
    async fn a_broken_shim_is_passed_over_and_the_reason_kept() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let shim = folder.path().join("python3");
        std::fs::write(
            &shim,
            "#!/bin/sh\necho 'shim: no version is set' >&2\nexit 127\n",
        )
        .unwrap();
        std::fs::set_permissions(&shim, std::fs::Permissions::from_mode(0o755)).unwrap();
        let variables = BTreeMap::from([(
            "PATH".to_owned(),
            folder.path().to_string_lossy().into_owned(),
        )]);
        let refusals = find(&PythonRequest::Any, &variables).await.unwrap_err();
        assert_eq!(refusals.len(), 1);
        assert!(
            refusals[0].ends_with("it does not work: shim: no version is set"),
            "{refusals:?}"
        );
    }
}
