//! Tests of whole builds. Most use a fake uv, which copies nothing from anywhere; the last ones use
//! the real uv and a package index.

use std::os::unix::fs::PermissionsExt;
use std::sync::Mutex;
use std::time::Instant;

use super::*;

/// A fake uv: creates the directories that uv would create, with an empty IPython in them. The file
/// "release" beside it determines the version that it chooses; the last list that it installed from
/// is kept there too. It fails for a package called "broken".
const STAND_IN: &str = r#"#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
case "$1" in
venv)
    for last; do :; done
    mkdir -p "$last/bin"
    ln -s /usr/bin/python3 "$last/bin/python" && ln -s python "$last/bin/python3"
    touch "$last/bin/activate"
    ;;
pip)
    while [ "$1" != "--python" ]; do case "$1" in compile) step=compile ;; esac; shift; done
    if [ "$step" = compile ]; then
        output="$4"
        for last; do :; done
        if grep -q broken "$last"; then echo "No solution found for broken" >&2; exit 1; fi
        { echo "--index-url https://user:password@example.com/simple"
          echo "ipython==9.$(cat "$(dirname "$0")/release") --hash=sha256:aa --hash=sha256:bb"; } > "$output"
        exit
    fi
    cp "$4" "$(dirname "$0")/installed-from"
    echo "Resolved 2 packages in 1ms" >&2
    tree="$(dirname "$(dirname "$2")")"
    site="$tree/lib/python$("$tree/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages"
    mkdir -p "$site/IPython" "$site/ipython-9.0.dist-info"
    echo "value = 1" > "$site/IPython/__init__.py"
    chmod 600 "$site/IPython/__init__.py"
    echo "open('/dev/null/x')" > "$site/hostile.pth"
    echo "Installed 2 packages in 1ms" >&2
    ;;
esac
"#;

struct Bench {
    folder: tempfile::TempDir,
    variables: BTreeMap<String, String>,
    told: Mutex<Vec<String>>,
}

impl Bench {
    /// Returns `None` and prints a note if this machine has no Python in its system directories.
    fn new() -> Option<Bench> {
        if !Path::new("/usr/bin/python3").exists() {
            println!("skipped: needs /usr/bin/python3");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let uv = folder.path().join("uv");
        std::fs::write(&uv, STAND_IN).unwrap();
        std::fs::set_permissions(&uv, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(folder.path().join("release"), "0").unwrap();
        let variables = [
            ("PATH", "/usr/bin:/bin"),
            ("CELLBLOCK_UV", uv.to_str().unwrap()),
        ];
        let variables = variables
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
        Some(Bench {
            folder,
            variables,
            told: Mutex::default(),
        })
    }

    fn data_dir(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    async fn ensure(&self, spec: &EnvironmentSpec) -> Result<Environment, EnvironmentError> {
        let tell = |progress: EnvironmentProgress| self.told.lock().unwrap().push(progress.step);
        ensure_with(spec, None, &self.data_dir(), &self.variables, &tell).await
    }

    async fn ensure_locked(
        &self,
        spec: &EnvironmentSpec,
        lock: &Lockfile,
    ) -> Result<Environment, EnvironmentError> {
        ensure_with(spec, Some(lock), &self.data_dir(), &self.variables, &|_| {}).await
    }

    async fn resolve(&self, input: &Input) -> Result<(Lockfile, PythonRequest), EnvironmentError> {
        resolve_with(input, None, &self.data_dir(), &self.variables, &|_| {}).await
    }

    /// Makes the index offer a newer version from now on.
    fn release(&self, number: &str) {
        std::fs::write(self.folder.path().join("release"), number).unwrap();
    }

    fn installed_from(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("installed-from")).unwrap()
    }

    fn installs(&self) -> usize {
        let calls = std::fs::read_to_string(self.folder.path().join("calls")).unwrap_or_default();
        calls
            .lines()
            .filter(|call| call.starts_with("pip install"))
            .count()
    }

    fn names_on_disk(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.data_dir().join("environments")).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| !name.ends_with(".lock"))
            .collect()
    }
}

fn spec(name: &str, packages: &[&str]) -> EnvironmentSpec {
    EnvironmentSpec {
        name: EnvironmentName::new(name).unwrap(),
        packages: packages
            .iter()
            .map(|package| (*package).to_owned())
            .collect(),
        preload: Vec::new(),
        python: PythonRequest::Any,
    }
}

#[tokio::test]
async fn an_environment_is_built_once_and_then_found() {
    let Some(bench) = Bench::new() else { return };
    let built = bench.ensure(&spec("a", &["x"])).await.unwrap();
    assert_eq!(built.python_inside, "/opt/cellblock/env/bin/python");
    assert!(
        built.root.join("bin/python").is_symlink() && !built.root.join("bin/activate").exists()
    );
    let packages = built.root.join(format!(
        "lib/python{}/site-packages",
        line(&built.python_version)
    ));
    let mode = std::fs::metadata(packages.join("IPython/__init__.py"))
        .unwrap()
        .permissions()
        .mode()
        & 0o777;
    assert_eq!(mode, 0o644, "others can read what was closed to them");
    assert_eq!(
        std::fs::read_dir(packages.join("IPython/__pycache__"))
            .unwrap()
            .count(),
        1
    );
    bench.told.lock().unwrap().clear();
    let found = bench.ensure(&spec("a", &["x"])).await.unwrap();
    assert_eq!(found.root, built.root);
    assert_eq!((bench.installs(), bench.told.lock().unwrap().len()), (1, 0));
    let listed = list(&bench.data_dir());
    assert_eq!(listed[0].record.installed, ["ipython==9.0"]);
    assert_eq!(listed[0].processes, [std::process::id()]);
    assert!(listed[0].in_use && listed[0].record.size > 0);
}

fn line(version: &str) -> String {
    version.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

#[tokio::test]
async fn a_changed_wish_makes_a_new_one_and_removes_the_old_when_nobody_uses_it() {
    let Some(bench) = Bench::new() else { return };
    let first = bench.ensure(&spec("a", &["x"])).await.unwrap();
    let second = bench.ensure(&spec("a", &["y"])).await.unwrap();
    assert_eq!(bench.names_on_disk().len(), 2, "the first one is in use");
    drop((first, second));
    let third = bench.ensure(&spec("a", &["z"])).await.unwrap();
    assert_eq!(
        bench.names_on_disk(),
        [third
            .root
            .parent()
            .unwrap()
            .file_name()
            .unwrap()
            .to_string_lossy()]
    );
}

#[tokio::test]
async fn an_environment_in_use_is_not_removed() {
    let Some(bench) = Bench::new() else { return };
    let used = bench.ensure(&spec("a", &[])).await.unwrap();
    let name = EnvironmentName::new("a").unwrap();
    let refusal = remove(&bench.data_dir(), &name).unwrap_err().to_string();
    assert!(
        refusal.contains(&format!("in use by process {}", std::process::id())),
        "{refusal}"
    );
    assert!(used.root.exists());
    drop(used);
    assert!(remove(&bench.data_dir(), &name).unwrap() > 0);
    assert!(bench.names_on_disk().is_empty());
    let refusal = remove(&bench.data_dir(), &name).unwrap_err().to_string();
    assert_eq!(
        refusal,
        "there is no environment \"a\" to remove; built are: none"
    );
}

#[tokio::test]
async fn two_builders_of_one_name_wait_for_each_other() {
    let Some(bench) = Bench::new() else { return };
    let wish = spec("a", &["x"]);
    let (one, two) = tokio::join!(bench.ensure(&wish), bench.ensure(&wish));
    assert_eq!(one.unwrap().root, two.unwrap().root);
    assert_eq!(bench.installs(), 1);
    assert!(
        bench
            .told
            .lock()
            .unwrap()
            .iter()
            .any(|step| step.starts_with("waiting for another process"))
    );
}

#[tokio::test]
async fn a_failed_build_repeats_the_installer_and_leaves_nothing_that_looks_finished() {
    let Some(bench) = Bench::new() else { return };
    let failure = bench
        .ensure(&spec("a", &["broken"]))
        .await
        .unwrap_err()
        .to_string();
    assert_eq!(
        failure,
        "could not resolve the packages with uv:\nNo solution found for broken"
    );
    assert!(list(&bench.data_dir()).is_empty());
    assert!(bench.names_on_disk().is_empty());
    std::fs::create_dir(
        bench
            .data_dir()
            .join("environments/.building-a-0123456789ab"),
    )
    .unwrap();
    bench.ensure(&spec("a", &["x"])).await.unwrap();
    assert_eq!(
        bench.names_on_disk().len(),
        1,
        "what the failed build left is gone"
    );
}

#[tokio::test]
async fn a_module_to_preload_that_is_not_there_is_noticed_at_once() {
    let Some(bench) = Bench::new() else { return };
    let mut wish = spec("a", &["x"]);
    wish.preload = vec!["json".to_owned(), "IPython.nothing".to_owned()];
    let failure = bench.ensure(&wish).await.unwrap_err().to_string();
    assert!(
        failure.contains("the module IPython.nothing is not in the environment"),
        "{failure}"
    );
    wish.preload = vec!["json".to_owned(), "IPython".to_owned()];
    assert_eq!(bench.ensure(&wish).await.unwrap().preload.len(), 2);
}

#[tokio::test]
async fn a_python_that_does_not_exist_is_named() {
    let Some(bench) = Bench::new() else { return };
    let mut wish = spec("a", &["x"]);
    wish.python = PythonRequest::Path("/nowhere/python3".into());
    let failure = bench.ensure(&wish).await.unwrap_err().to_string();
    assert!(
        failure.contains("/nowhere/python3") && failure.contains("apt install python3"),
        "{failure}"
    );
}

#[tokio::test]
async fn what_was_built_by_hand_is_known_by_its_newest_record() {
    let Some(bench) = Bench::new() else { return };
    bench.ensure(&spec("a", &["x"])).await.unwrap();
    bench.ensure(&spec("b", &["y"])).await.unwrap();
    let specs = built_specs(&bench.data_dir());
    let known: Vec<_> = specs
        .iter()
        .map(|spec| (spec.name.as_str(), spec.packages.join(" ")))
        .collect();
    assert_eq!(
        known,
        [
            ("a", "x ipython pydantic>=2.9".to_owned()),
            ("b", "y ipython pydantic>=2.9".to_owned())
        ]
    );
    bench.ensure(&specs[0]).await.unwrap();
    assert_eq!(
        bench.installs(),
        2,
        "a recorded spec leads back to the same environment"
    );
}

#[tokio::test]
async fn an_environment_is_installed_from_its_lock_which_lies_beside_it() {
    let Some(bench) = Bench::new() else { return };
    let built = bench.ensure(&spec("a", &["x"])).await.unwrap();
    let lock = list(&bench.data_dir())[0].lock().unwrap();
    let expected = format!(
        "# Locked by Cellblock for Python {} on linux",
        line(&built.python_version)
    );
    assert!(
        lock.starts_with(&expected) && lock.contains("ipython==9.0 \\\n    --hash=sha256:aa"),
        "{lock}"
    );
    let calls = std::fs::read_to_string(bench.folder.path().join("calls")).unwrap();
    assert!(
        calls.contains("--generate-hashes") && calls.contains("pip install --require-hashes"),
        "{calls}"
    );
    assert!(
        bench
            .installed_from()
            .starts_with("--index-url https://user:password@"),
        "the index of the build is used"
    );
    for entry in std::fs::read_dir(built.root.parent().unwrap())
        .unwrap()
        .map(Result::unwrap)
    {
        let text = std::fs::read(entry.path()).unwrap_or_default();
        assert!(
            !String::from_utf8_lossy(&text).contains("password"),
            "{:?} keeps a password",
            entry.path()
        );
    }
}

#[tokio::test]
async fn a_lock_makes_the_same_environment_again_though_newer_versions_exist() {
    let Some(bench) = Bench::new() else { return };
    drop(bench.ensure(&spec("a", &["x"])).await.unwrap());
    let lock = Lockfile::parse(&list(&bench.data_dir())[0].lock().unwrap()).unwrap();
    bench.release("1");
    let mut wish = spec("b", &[]);
    wish.packages = lock.requirements();
    let locked = bench.ensure_locked(&wish, &lock).await.unwrap();
    assert_eq!(
        bench.installed_from().lines().next(),
        Some("ipython==9.0 \\")
    );
    assert_eq!(
        bench.ensure_locked(&wish, &lock).await.unwrap().root,
        locked.root,
        "it is found again"
    );
    assert_eq!(
        bench.ensure(&wish).await.unwrap().root,
        locked.root,
        "a server finds it by its packages"
    );
    let other = Lockfile::parse(&lock.text().replace("sha256:aa", "sha256:ab")).unwrap();
    let other = bench.ensure_locked(&wish, &other).await.unwrap();
    assert_ne!(
        other.root, locked.root,
        "other hashes make another environment"
    );
    drop(bench.ensure(&spec("c", &["x"])).await.unwrap());
    assert_eq!(
        bench.installed_from().lines().nth(1),
        Some("ipython==9.1 \\"),
        "without a lock the newer one is chosen"
    );
}

#[tokio::test]
async fn an_update_of_the_interpreter_keeps_the_versions_of_packages() {
    let Some(bench) = Bench::new() else { return };
    let built = bench.ensure(&spec("a", &["x"])).await.unwrap();
    let directory = built.root.parent().unwrap().to_owned();
    let other = directory.with_file_name("a-0123456789ab");
    drop(built);
    // The state after an update: the interpreter differs from the one in the record, and the
    // directory name would differ too.
    std::fs::rename(&directory, &other).unwrap();
    let mut record = Record::read(&other).unwrap();
    record.executable = "/usr/bin/env".into();
    record.write(&other).unwrap();
    bench.release("1");
    let again = bench.ensure(&spec("a", &["x"])).await.unwrap();
    assert_eq!(
        (again.root.parent().unwrap(), bench.installs()),
        (directory.as_path(), 2)
    );
    assert_eq!(
        bench.installed_from().lines().next(),
        Some("ipython==9.0 \\")
    );
}

#[tokio::test]
async fn files_are_resolved_to_a_lock_with_the_hashes_that_they_insist_on() {
    let Some(bench) = Bench::new() else { return };
    let file = bench.folder.path().join("requirements.txt");
    let input = Input::Requirements(vec![file.clone()]);
    std::fs::write(&file, "ipython==9.0 --hash=sha256:bb").unwrap();
    let (lock, python) = bench.resolve(&input).await.unwrap();
    assert_eq!(
        (lock.requirements(), python),
        (vec!["ipython==9.0".to_owned()], PythonRequest::Any)
    );
    assert!(
        lock.text().contains("sha256:bb") && !lock.text().contains("sha256:aa"),
        "{}",
        lock.text()
    );
    std::fs::write(&file, "ipython==9.0 --hash=sha256:00").unwrap();
    let refusal = bench.resolve(&input).await.unwrap_err();
    assert_eq!(
        std::error::Error::source(&refusal).unwrap().to_string(),
        "none of the hashes that are asked for belongs to ipython==9.0"
    );
}

#[tokio::test]
async fn the_runner_is_written_once_and_compiled_for_the_inside() {
    let Some(bench) = Bench::new() else { return };
    let environment = bench.ensure(&spec("a", &[])).await.unwrap();
    let written = runner_files::ensure_runner(&bench.data_dir(), &environment)
        .await
        .unwrap();
    let package = written.join(runner_files::PACKAGE);
    let cache = package.join("__pycache__");
    let compiled: Vec<_> = std::fs::read_dir(&cache)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    let is_source = |path: &Path| path.extension().is_some_and(|extension| extension == "py");
    let sources = std::fs::read_dir(&package)
        .unwrap()
        .filter(|entry| is_source(&entry.as_ref().unwrap().path()))
        .count();
    assert_eq!(compiled.len(), sources);
    let bytecode = std::fs::read(&compiled[0]).unwrap();
    assert_eq!(bytecode[4], 1, "the source is never looked at again");
    assert!(String::from_utf8_lossy(&bytecode).contains("/opt/cellblock/runner/cellblock_runner/"));
    assert_eq!(
        std::fs::metadata(&written).unwrap().permissions().mode() & 0o777,
        0o755
    );
    assert_eq!(
        runner_files::ensure_runner(&bench.data_dir(), &environment)
            .await
            .unwrap(),
        written
    );
    let torn = [compiled[0].clone(), package.join("serve.py")];
    for file in torn {
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(
            runner_files::ensure_runner(&bench.data_dir(), &environment)
                .await
                .unwrap(),
            written
        );
        assert_eq!(
            std::fs::read(&file).unwrap(),
            whole,
            "a torn file is written again"
        );
    }
    assert_eq!(
        std::fs::read_dir(bench.data_dir().join("runner"))
            .unwrap()
            .count(),
        1,
        "nothing else is left behind"
    );
}

/// Returns the environment variables for a build with a real package index, without uv on the path.
/// Returns `None` and prints a note if such tests are disabled here.
fn with_package_index() -> Option<BTreeMap<String, String>> {
    if std::env::var_os("SKIP_PACKAGE_INDEX_TESTS").is_some()
        || !Path::new("/usr/bin/python3").exists()
    {
        println!("skipped: needs a package index");
        return None;
    }
    let mut variables: BTreeMap<String, String> = std::env::vars()
        .filter(|(name, _)| name != "CELLBLOCK_UV")
        .collect();
    variables.insert("PATH".to_owned(), "/usr/bin:/bin".to_owned());
    Some(variables)
}

/// Returns whether a program needs a dynamic loader, at the path that the program names.
fn names_loader(program: &Path) -> bool {
    let bytes = std::fs::read(program).unwrap();
    let number = |at: usize, length: usize| {
        bytes[at..at + length]
            .iter()
            .rev()
            .fold(0, |sum, &byte| sum << 8 | usize::from(byte))
    };
    let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    (0..count).any(|index| number(table + index * size, 4) == 3)
}

#[tokio::test]
async fn uv_is_fetched_and_a_real_environment_is_built_found_and_removed() {
    let Some(variables) = with_package_index() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let [_, minimal] = EnvironmentSpec::built_in();
    let built = ensure_with(&minimal, None, folder.path(), &variables, &|_| {})
        .await
        .unwrap();
    let site = built.root.join(format!(
        "lib/python{}/site-packages",
        line(&built.python_version)
    ));
    assert!(site.join("IPython/core/interactiveshell.py").is_file());
    let uv = uv::find(&variables, folder.path())
        .unwrap()
        .expect("it was used just now");
    // Unless the machine has its own uv, the installed one must run in every image.
    assert!(names_loader(Path::new("/usr/bin/env")), "control");
    assert!(!uv.starts_with(folder.path()) || !names_loader(&uv));
    let started = Instant::now();
    let found = ensure_with(&minimal, None, folder.path(), &variables, &|_| {})
        .await
        .unwrap();
    println!("found again in {:?}", started.elapsed());
    assert_eq!(found.root, built.root);
    drop((built, found));
    assert!(remove(folder.path(), &minimal.name).unwrap() > 1 << 20);
}

#[tokio::test]
async fn files_with_everything_in_them_are_locked_and_a_wrong_hash_is_not_installed() {
    let Some(variables) = with_package_index() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name)
    };
    write("more.txt", "idna\n");
    write("constraints.txt", "idna<3.7\n");
    let requirements =
        "-r more.txt\n-c constraints.txt\ncolorama ; sys_platform == 'win32' # not here\n";
    let input = Input::Requirements(vec![write("requirements.txt", requirements)]);
    let (lock, _) = resolve_with(&input, None, folder.path(), &variables, &|_| {})
        .await
        .unwrap();
    let names = lock.requirements().join(" ");
    assert!(
        names.contains("idna==3.6") && names.contains("ipython==") && !names.contains("colorama"),
        "{names}"
    );

    let project = "[project]\nname = 'a'\nversion = '1'\nrequires-python = '>=3.10'\ndependencies \
                   = ['six']\n\
                   [project.optional-dependencies]\nnet = ['idna']\n";
    let input = Input::Project {
        file: write("pyproject.toml", project),
        extras: vec!["net".to_owned()],
    };
    let (lock, python) = resolve_with(&input, None, folder.path(), &variables, &|_| {})
        .await
        .unwrap();
    let names = lock.requirements().join(" ");
    assert!(
        names.contains("six==") && names.contains("idna=="),
        "{names}"
    );
    assert_eq!(python, PythonRequest::Range(">=3.10".to_owned()));

    let mut wish = spec("a", &[]);
    wish.packages = lock.requirements();
    let text = lock.text();
    let forged = text
        .lines()
        .map(|line| match line.trim().strip_prefix("--hash=sha256:") {
            Some(hash) => format!("    --hash=sha256:{}{}\n", "0".repeat(64), &hash[64..]),
            None => format!("{line}\n"),
        });
    let forged = Lockfile::parse(&forged.collect::<String>()).unwrap();
    let refusal = ensure_with(&wish, Some(&forged), folder.path(), &variables, &|_| {})
        .await
        .unwrap_err()
        .to_string();
    assert!(refusal.contains("Hash mismatch"), "{refusal}");
    let built = ensure_with(&wish, Some(&lock), folder.path(), &variables, &|_| {})
        .await
        .unwrap();
    assert!(
        built
            .packages
            .iter()
            .any(|package| package.starts_with("six==")),
        "{:?}",
        built.packages
    );
}

#[tokio::test]
async fn a_package_without_wheels_is_refused_with_the_words_of_uv() {
    let Some(variables) = with_package_index() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let wish = spec("a", &["there-is-surely-no-package-of-this-name-0"]);
    let failure = ensure_with(&wish, None, folder.path(), &variables, &|_| {})
        .await
        .unwrap_err()
        .to_string();
    assert!(
        failure.contains("there-is-surely-no-package-of-this-name-0"),
        "{failure}"
    );
}
