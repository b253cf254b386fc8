//! The installer uv: finds it, installs it if missing, and runs it.
//!
//! uv behaves like the user's own uv or pip: their settings are passed on, and pip's are translated
//! where uv has a different name for them. Its output is parsed for progress and kept for errors.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Command;
use tokio::sync::mpsc;

use super::interpreter::BasePython;
use super::{EnvironmentError, EnvironmentProgress, Progress, while_doing};

/// Maximum number of lines of installer output in an error.
const LINES_KEPT: usize = 30;

/// Variables that would redirect uv or Python to a different target.
const MISLEADING: [&str; 12] = [
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "UV_SYSTEM_PYTHON",
    "UV_PYTHON",
    "UV_LINK_MODE",
    "UV_COMPILE_BYTECODE",
    "UV_NO_BINARY",
    "UV_NO_VERIFY_HASHES",
    "UV_WORKING_DIRECTORY",
];

/// pip's variables and uv's names for them. The first name is set, unless any of the names is
/// already set.
const TRANSLATED: [(&str, &[&str]); 5] = [
    ("PIP_INDEX_URL", &["UV_DEFAULT_INDEX", "UV_INDEX_URL"]),
    ("PIP_EXTRA_INDEX_URL", &["UV_INDEX", "UV_EXTRA_INDEX_URL"]),
    ("PIP_CERT", &["SSL_CERT_FILE"]),
    ("PIP_TRUSTED_HOST", &["UV_INSECURE_HOST"]),
    (
        "PIP_PROXY",
        &[
            "ALL_PROXY",
            "all_proxy",
            "HTTPS_PROXY",
            "https_proxy",
            "HTTP_PROXY",
            "http_proxy",
        ],
    ),
];

/// Returns the environment variables that an installer runs with.
pub(super) fn installer_variables(own: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut variables = own.clone();
    variables.retain(|name, _| !MISLEADING.contains(&name.as_str()));
    for (pip, names) in TRANSLATED {
        if let Some(value) = own
            .get(pip)
            .filter(|_| !names.iter().any(|name| own.contains_key(*name)))
        {
            variables.insert(names[0].to_owned(), value.clone());
        }
    }
    if !SYSTEM_CERTIFICATES
        .iter()
        .any(|name| own.contains_key(*name))
    {
        variables.extend(SYSTEM_CERTIFICATES.map(|name| (name.to_owned(), "true".to_owned())));
    }
    variables
}

/// Makes uv trust the machine's certificates, as pip does, so that an index behind a company's own
/// certificate authority works. The second is the older name.
const SYSTEM_CERTIFICATES: [&str; 2] = ["UV_SYSTEM_CERTS", "UV_NATIVE_TLS"];

/// Finds uv: named by `CELLBLOCK_UV`, on the path, or installed by us earlier.
pub(super) fn find(
    variables: &BTreeMap<String, String>,
    data_dir: &Path,
) -> Result<Option<PathBuf>, EnvironmentError> {
    if let Some(named) = variables
        .get("CELLBLOCK_UV")
        .filter(|named| !named.is_empty())
    {
        let named = PathBuf::from(named);
        return if is_program(&named) {
            Ok(Some(named))
        } else {
            Err(EnvironmentError::NoSuchInstaller(named))
        };
    }
    let folders = variables
        .get("PATH")
        .map_or("", String::as_str)
        .split(':')
        .map(Path::new);
    let on_path = folders
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join("uv"));
    Ok(on_path
        .chain([own_uv(data_dir)])
        .find(|candidate| is_program(candidate)))
}

/// Installs uv below our own directory with pip, or with the pip of a new virtual environment.
pub(super) async fn install(
    interpreter: &BasePython,
    variables: &BTreeMap<String, String>,
    data_dir: &Path,
    progress: Progress<'_>,
) -> Result<PathBuf, EnvironmentError> {
    progress(EnvironmentProgress::step(
        "installing uv, the package installer",
    ));
    let tools = data_dir.join("tools");
    std::fs::create_dir_all(&tools).map_err(while_doing("make the folder for tools"))?;
    // A separate directory keeps two processes apart, and a crash leaves nothing that looks
    // finished.
    let workshop = tempfile::Builder::new()
        .prefix(".installing-")
        .tempdir_in(&tools)
        .map_err(while_doing("make a folder to install uv in"))?;
    let mut variables = installer_variables(variables);
    for (name, value) in [
        ("PIP_USER", "0"),
        ("PIP_REQUIRE_VIRTUALENV", "0"),
        ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
    ] {
        variables.insert(name.to_owned(), value.to_owned());
    }

    let mut python = interpreter.executable.clone();
    if run(&python, ["-m", "pip", "--version"], &variables, &mut |_| {})
        .await
        .is_err()
    {
        let place = workshop.path().join("venv");
        let made = run(
            &python,
            [OsStr::new("-m"), OsStr::new("venv"), place.as_os_str()],
            &variables,
            &mut |_| {},
        )
        .await;
        if let Err(failure) = made {
            return Err(EnvironmentError::NoInstaller {
                python,
                output: failure.output,
            });
        }
        python = place.join("bin/python");
    }
    let target = workshop.path().join("target");
    let arguments = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ];
    let arguments = arguments
        .map(OsString::from)
        .into_iter()
        .chain(platforms(std::env::consts::ARCH));
    let arguments = arguments.chain([
        "--target".into(),
        target.clone().into_os_string(),
        "uv".into(),
    ]);
    run(&python, arguments, &variables, &mut |_| {})
        .await
        .map_err(|failure| failure.during("install uv with pip"))?;

    let installed = own_uv(data_dir);
    std::fs::rename(target.join("bin/uv"), &installed)
        .map_err(while_doing("put uv in its place"))?;
    Ok(installed)
}

/// Returns the platform tags of uv builds for this architecture, in order of preference. The musl
/// builds are linked statically, so they run in every image, whatever its C library.
fn platforms(machine: &str) -> impl Iterator<Item = OsString> {
    let builds = [
        "musllinux_1_1",
        "musllinux_1_2",
        "manylinux2014",
        "manylinux_2_17",
        "manylinux_2_28",
    ];
    builds
        .into_iter()
        .flat_map(move |build| ["--platform".into(), format!("{build}_{machine}").into()])
}

/// A program that failed, with its last output.
#[derive(Debug)]
pub(super) struct UvFailure {
    pub(super) output: String,
}

impl UvFailure {
    pub(super) fn during(self, attempt: &str) -> EnvironmentError {
        EnvironmentError::Installer {
            attempt: attempt.to_owned(),
            output: shortened(&self.output),
        }
    }
}

/// Limits on the installer output in an error. An agent reads it and pays for it.
const MAX_LINES: usize = 10;
const MAX_CHARS: usize = 800;

/// Reduces installer output to the failure, with advice where it is known.
fn shortened(output: &str) -> String {
    if let Some(reason) = unreachable_index(output) {
        return format!(
            "the package index cannot be reached: {reason}\nSee that the network works and that \
             the index \
             (UV_DEFAULT_INDEX or PIP_INDEX_URL) and the proxy (HTTPS_PROXY) are right"
        );
    }
    let is_told = |line: &&str| {
        !CHATTER
            .iter()
            .any(|start| line.trim_start().starts_with(start))
    };
    let told: Vec<&str> = output.lines().filter(is_told).collect();
    // The error starts at the first line that is marked as one; earlier lines are progress.
    let is_error = |line: &&str| line.to_ascii_lowercase().contains("error") || line.contains('×');
    let begin = told
        .iter()
        .position(is_error)
        .unwrap_or(told.len().saturating_sub(MAX_LINES));
    let text = told[begin..]
        .iter()
        .take(MAX_LINES)
        .copied()
        .collect::<Vec<_>>()
        .join("\n");
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{} […]", &text[..end]),
        None => text,
    }
}

/// Prefixes of progress lines.
const CHATTER: [&str; 8] = [
    "Using ",
    "Resolved ",
    "Downloading ",
    "Downloaded ",
    "Prepared ",
    "Building ",
    "WARNING: ",
    "[notice]",
];

/// Returns why the index was not reached, if that is the failure. Both installers print the reason
/// last in a chain of causes. pip then adds that there is no such package, which it cannot know.
fn unreachable_index(output: &str) -> Option<String> {
    let of_pip = output
        .lines()
        .rev()
        .find_map(|line| line.split_once("after connection broken by "))
        .map(|(_, error)| {
            // The message of the innermost exception ends with its quote.
            let words = error
                .rsplit_once(": /")
                .map_or(error, |(error, _)| error)
                .trim_end_matches('\'');
            let words = &words[..words.rfind(['\'', '"']).unwrap_or(words.len())];
            let reason = words.rsplit(": ").next().unwrap_or(words);
            reason
                .strip_prefix("[Errno ")
                .and_then(|rest| rest.split_once("] "))
                .map_or(reason, |(_, reason)| reason)
        });
    let of_uv = || {
        let causes = output
            .lines()
            .filter_map(|line| line.trim_start().split_once("ause").map(|(_, rest)| rest));
        let mut causes = causes.filter_map(|rest| rest.split_once(": ").map(|(_, cause)| cause));
        causes
            .next_back()
            .filter(|_| output.contains("error sending request"))
    };
    of_pip.or_else(of_uv).map(|reason| reason.trim().to_owned())
}

/// Runs a program until it exits, passes each output line to `line`, and keeps the last lines for
/// the error.
///
/// Files that it creates are readable by others, whatever our umask is: a sandbox has another user.
pub(super) async fn run<A: AsRef<OsStr>>(
    program: &Path,
    arguments: impl IntoIterator<Item = A>,
    variables: &BTreeMap<String, String>,
    line: &mut (dyn FnMut(&str) + Send),
) -> Result<(), UvFailure> {
    let failed = |why: String| UvFailure { output: why };
    let mut child = Command::new("/bin/sh")
        .args(["-c", "umask 022; exec \"$@\"", "sh"])
        .arg(program)
        .args(arguments)
        .env_clear()
        .envs(variables)
        // The current directory may contain a pyproject.toml or uv.toml, which must not apply.
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| failed(format!("{} cannot be run: {error}", program.display())))?;
    let (sender, mut lines) = mpsc::channel::<String>(64);
    let standard_output = child.stdout.take().expect("standard output was asked for");
    let standard_error = child.stderr.take().expect("standard error was asked for");
    let readers = (
        tokio::spawn(forward(standard_output, sender.clone())),
        tokio::spawn(forward(standard_error, sender)),
    );
    let mut last = VecDeque::new();
    while let Some(text) = lines.recv().await {
        line(&text);
        last.push_back(text);
        if last.len() > LINES_KEPT {
            last.pop_front();
        }
    }
    let _ = tokio::join!(readers.0, readers.1);
    let status = child
        .wait()
        .await
        .map_err(|error| failed(error.to_string()))?;
    if status.success() {
        return Ok(());
    }
    if last.is_empty() {
        last.push_back(format!("it ended with {status} and said nothing"));
    }
    Err(failed(Vec::from(last).join("\n")))
}

async fn forward(source: impl AsyncRead + Unpin, lines: mpsc::Sender<String>) {
    let mut source = BufReader::new(source);
    let mut bytes = Vec::new();
    while let Ok(1..) = source.read_until(b'\n', &mut bytes).await {
        let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        bytes.clear();
        if !text.is_empty() && lines.send(text).await.is_err() {
            return;
        }
    }
}

/// Parses uv's output during an installation.
#[derive(Debug, Default)]
pub(super) struct Following {
    done: u64,
    total: Option<u64>,
}

impl Following {
    /// Returns the progress that a line reports, if any.
    pub(super) fn read(&mut self, line: &str) -> Option<EnvironmentProgress> {
        let mut words = line.split_whitespace();
        let step = match (words.next()?, words.next()?) {
            ("Resolved", number) => {
                self.total = number.parse().ok();
                "downloading packages".to_owned()
            }
            ("Downloading", package) => format!("downloading {package}"),
            ("Downloaded", package) => {
                self.done = (self.done + 1).min(self.total.unwrap_or(u64::MAX));
                format!("downloaded {package}")
            }
            ("Prepared", _) => {
                self.done = self.total.unwrap_or(self.done);
                "installing packages".to_owned()
            }
            ("Installed", _) => {
                self.done = self.total.unwrap_or(self.done);
                "installed packages".to_owned()
            }
            _ => return None,
        };
        Some(EnvironmentProgress {
            step,
            done: self.done,
            total: self.total,
        })
    }
}

pub(super) fn own_uv(data_dir: &Path) -> PathBuf {
    data_dir.join("tools/uv")
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn none() -> BTreeMap<String, String> {
        variables(&[("PATH", "/usr/bin:/bin")])
    }

    #[test]
    fn settings_of_pip_are_translated_unless_uv_has_its_own() {
        let own = variables(&[
            ("PIP_INDEX_URL", "https://a"),
            ("PIP_CERT", "/c"),
            ("UV_INDEX", "https://mine"),
            ("PIP_EXTRA_INDEX_URL", "https://b"),
        ]);
        let given = installer_variables(&own);
        assert_eq!(given["UV_DEFAULT_INDEX"], "https://a");
        assert_eq!(given["SSL_CERT_FILE"], "/c");
        assert_eq!(given["UV_INDEX"], "https://mine");
        let older = installer_variables(&variables(&[
            ("PIP_INDEX_URL", "https://a"),
            ("UV_INDEX_URL", "https://mine"),
        ]));
        assert!(!older.contains_key("UV_DEFAULT_INDEX"));
    }

    #[test]
    fn variables_that_would_mislead_are_left_out_and_others_passed_on() {
        let given = installer_variables(&variables(&[
            ("VIRTUAL_ENV", "/v"),
            ("UV_LINK_MODE", "symlink"),
            ("HTTPS_PROXY", "http://p"),
        ]));
        let certificates = [("UV_SYSTEM_CERTS", "true"), ("UV_NATIVE_TLS", "true")];
        assert_eq!(
            given,
            variables(&[&[("HTTPS_PROXY", "http://p")], &certificates[..]].concat())
        );
        let chosen = variables(&[("UV_NATIVE_TLS", "false")]);
        assert_eq!(installer_variables(&chosen), chosen);
    }

    #[test]
    fn uv_is_taken_from_its_variable_then_the_path_then_our_own_folder() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let program = |place: &str| {
            let path = folder.path().join(place);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let (named, on_path, own) = (
            program("named"),
            program("bin/uv"),
            program("data/tools/uv"),
        );
        let data_dir = folder.path().join("data");
        let path = folder.path().join("bin").to_string_lossy().into_owned();
        let find = |pairs: &[(&str, &str)]| find(&variables(pairs), &data_dir);
        assert_eq!(
            find(&[("CELLBLOCK_UV", named.to_str().unwrap()), ("PATH", &path)]).unwrap(),
            Some(named.clone())
        );
        assert_eq!(find(&[("PATH", &path)]).unwrap(), Some(on_path));
        assert_eq!(find(&[("PATH", "/nowhere")]).unwrap(), Some(own.clone()));
        assert!(
            find(&[("CELLBLOCK_UV", "/nowhere/uv"), ("PATH", &path)]).is_err(),
            "a wrong name is not passed over"
        );
        std::fs::remove_file(own).unwrap();
        assert_eq!(find(&[("PATH", "/nowhere")]).unwrap(), None);
    }

    #[tokio::test]
    async fn without_pip_and_venv_the_cure_is_named() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let executable = folder.path().join("python3");
        std::fs::write(
            &executable,
            "#!/bin/sh\necho \"No module named $2\" >&2\nexit 1\n",
        )
        .unwrap();
        std::fs::set_permissions(&executable, std::fs::Permissions::from_mode(0o755)).unwrap();
        let version = "3.11.2".to_owned();
        let interpreter = BasePython {
            executable,
            version,
            base_prefix: folder.path().to_owned(),
            library_dir: None,
        };
        let error = install(&interpreter, &none(), &folder.path().join("data"), &|_| {})
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("apt install python3-venv") && error.ends_with("No module named venv"),
            "{error}"
        );
        let left = std::fs::read_dir(folder.path().join("data/tools"))
            .unwrap()
            .count();
        assert_eq!(left, 0, "nothing half-installed is left");
    }

    #[test]
    fn progress_is_read_from_what_uv_writes() {
        let written = "Using Python 3.12.1 environment at: v\nResolved 28 packages in \
                       405ms\nDownloading numpy (16.0MiB)\n \
                       Downloaded numpy\nPrepared 28 packages in 568ms\nInstalled 28 packages in \
                       457ms\n + numpy==2.5.4\n";
        let mut following = Following::default();
        let told: Vec<_> = written
            .lines()
            .filter_map(|line| following.read(line))
            .collect();
        let told: Vec<_> = told
            .iter()
            .map(|progress| (progress.step.as_str(), progress.done, progress.total))
            .collect();
        let expected = [
            ("downloading packages", 0, Some(28)),
            ("downloading numpy", 0, Some(28)),
            ("downloaded numpy", 1, Some(28)),
            ("installing packages", 28, Some(28)),
            ("installed packages", 28, Some(28)),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn an_index_that_is_not_reached_is_told_in_one_line_with_what_helps() {
        let retrying = |error: &str| {
            let line = format!(
                "WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, \
                 status=None)) after \
                 connection broken by '{error}': /simple/uv/\n"
            );
            line.repeat(5)
                + "ERROR: Could not find a version that satisfies the requirement uv (from \
                   versions: none)\n\
                   ERROR: No matching distribution found for uv"
        };
        let uv = |cause: &str| {
            format!(
                "Using CPython 3.11.7 interpreter at: /usr/bin/python\nerror: Request failed after \
                 3 retries in 11.0s\n  \
                 cause: Failed to fetch: http://index.test/simple/ipython/\n  \
                 cause: error sending request for url (http://index.test/simple/ipython/)\n  \
                 cause: client error (Connect)\n  cause: {cause}"
            )
        };
        let older_uv = uv("Connection refused (os error 111)").replace("cause:", "Caused by:");
        for (output, reason) in [
            (
                retrying(
                    "NewConnectionError('<pip._vendor.urllib3.connection.HTTPConnection object at \
                     0x7f22c7e74250>: \
                     Failed to establish a new connection: [Errno 111] Connection refused')",
                ),
                "Connection refused",
            ),
            (
                retrying(
                    "ReadTimeoutError(\"HTTPSConnectionPool(host='index.test', port=443): Read \
                     timed out. (read \
                     timeout=15)\")",
                ),
                "Read timed out. (read timeout=15)",
            ),
            (
                retrying(
                    "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] \
                     certificate verify \
                     failed: self-signed certificate (_ssl.c:1017)'))",
                ),
                "self-signed certificate (_ssl.c:1017)",
            ),
            (
                uv("failed to lookup address information: Name or service not known"),
                "Name or service not known",
            ),
            (older_uv, "Connection refused (os error 111)"),
        ] {
            let told = UvFailure { output }
                .during("install uv with pip")
                .to_string();
            let (first, cure) = told
                .trim_start_matches("could not install uv with pip:\n")
                .split_once('\n')
                .unwrap();
            let expected = first.strip_prefix("the package index cannot be reached: ");
            assert!(
                expected.is_some_and(|told| told.ends_with(reason)),
                "{told}"
            );
            assert!(cure.contains("PIP_INDEX_URL") && told.len() < 300, "{told}");
        }
    }

    #[test]
    fn other_failures_are_told_from_where_they_begin_and_within_a_limit() {
        let uv = "Using CPython 3.11.7 interpreter at: /usr/bin/python\nerror: No solution found \
                  when resolving \
                  dependencies\n  cause: Because nosuch was not found in the package registry, no.";
        assert_eq!(shortened(uv), uv.split_once('\n').unwrap().1);
        let missing = "ERROR: No matching distribution found for uv";
        assert_eq!(
            shortened(missing),
            missing,
            "an index that answers is not called unreachable"
        );
        assert_eq!(
            shortened("it ended with exit status: 1 and said nothing"),
            "it ended with exit status: 1 and said nothing"
        );
        let long: String = (0..500)
            .map(|number| format!("error {number} {}\n", "x".repeat(200)))
            .collect();
        assert!(shortened(&long).chars().count() < MAX_CHARS + 10);
        assert!(shortened(&long).starts_with("error 0 "));
    }

    #[tokio::test]
    async fn a_failure_keeps_the_last_lines_of_both_outputs() {
        let script = "for i in $(seq 40); do echo line $i; done; echo last >&2; exit 3";
        let failure = run(Path::new("/bin/sh"), ["-c", script], &none(), &mut |_| {})
            .await
            .unwrap_err();
        let lines: Vec<_> = failure.output.lines().collect();
        assert_eq!(lines.len(), LINES_KEPT);
        assert!(lines.contains(&"last") && !lines.contains(&"line 1"));
    }

    #[tokio::test]
    async fn files_are_made_readable_and_a_missing_program_is_a_failure() {
        let mut said = String::new();
        run(
            Path::new("/bin/sh"),
            ["-c", "umask"],
            &none(),
            &mut |line| said.push_str(line),
        )
        .await
        .unwrap();
        assert_eq!(said.trim_start_matches('0'), "22");
        let failure = run(Path::new("/nowhere/uv"), ["x"], &none(), &mut |_| {})
            .await
            .unwrap_err();
        assert!(failure.output.contains("/nowhere/uv"), "{failure:?}");
    }
}
