//! Installing packages with the real uv, from an index of our own.
//!
//! The installer's sandbox is a plain process in a folder here: these cases are about what uv,
//! `installer.py` and the store make of packages. `index` is the package index, `build_sandbox` the
//! stand-in for the sandbox. What a sandbox adds is in `sessions`, what the operator does in
//! `program`.

mod build_sandbox;
mod git;
pub(crate) mod index;
mod program;
mod proxy;
pub(crate) mod sessions;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cellblock::packages::{
    FileHosts, IndexSettings, IndexUrl, InstallLimits, InstallResult, Installer, PACKAGES_INSIDE,
    PackageError, PackageRequest, PackageVersion, Requirement, Store,
};

use crate::support::native::{host_python, run};
use crate::support::server::finished;
use crate::support::{data_folder, skipped};
use build_sandbox::Plain;
use index::{Index, Manner, PASSWORD};

/// A store, an index and an installer between them.
struct Bench {
    index: Index,
    build_sandboxes: Plain,
    installer: Installer,
    folder: tempfile::TempDir,
    told: Mutex<Vec<String>>,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(Manner::Open, |_| {})
    }

    fn with(manner: Manner, change: impl FnOnce(&mut InstallLimits)) -> Bench {
        let index = Index::start(&host_python("minimal"), manner);
        let mut limits = InstallLimits::default();
        change(&mut limits);
        let folder = tempfile::tempdir().unwrap();
        let installer = installer(folder.path(), &index, limits);
        let build_sandboxes = Plain::new(&uv(), &host_python("minimal"));
        Bench {
            index,
            build_sandboxes,
            installer,
            folder,
            told: Mutex::default(),
        }
    }

    /// What a server that is started later on the same store has.
    fn another_server(&self) -> Installer {
        installer(self.folder.path(), &self.index, InstallLimits::default())
    }

    fn install(
        &self,
        requirements: &[&str],
        present: &[(&str, &str)],
    ) -> Result<InstallResult, PackageError> {
        self.install_with(&self.installer, requirements, present)
    }

    fn install_with(
        &self,
        installer: &Installer,
        requirements: &[&str],
        present: &[(&str, &str)],
    ) -> Result<InstallResult, PackageError> {
        let request = PackageRequest {
            requirements: Requirement::parse_all(requirements, |host, _| host == "127.0.0.1")
                .unwrap(),
            upgrade: false,
            present: present
                .iter()
                .map(|(name, version)| PackageVersion::new(name, version))
                .collect(),
        };
        let tell =
            |step: cellblock::packages::Step| self.told.lock().unwrap().push(step.to_string());
        run(installer.install(&request, &self.build_sandboxes, &tell))
    }

    #[track_caller]
    fn refusal(&self, requirements: &[&str], present: &[(&str, &str)]) -> String {
        self.install(requirements, present)
            .expect_err("it should be refused")
            .to_string()
    }

    /// The folders of an installation as the host sees them.
    fn folders(&self, installed: &InstallResult) -> Vec<PathBuf> {
        let trees = self.installer.store().trees();
        installed
            .paths
            .iter()
            .map(|path| trees.join(path.strip_prefix(PACKAGES_INSIDE).unwrap()))
            .collect()
    }

    /// Runs Python with the folders of an installation, the way a session would have them.
    fn python(&self, installed: &InstallResult, code: &str) -> String {
        let folders: Vec<_> = self
            .folders(installed)
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        let mut command = Command::new(host_python("minimal"));
        command
            .args(["-S", "-B", "-c", code])
            .env("PYTHONPATH", folders.join(":"));
        let (status, output, errors) = finished(&mut command);
        assert_eq!(status, Some(0), "{errors}");
        output.trim().to_owned()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Stored folders are read-only; without root's rights nothing could be removed from them.
        let _ = Command::new("chmod")
            .arg("-R")
            .arg("u+rwX")
            .arg(self.folder.path())
            .status();
    }
}

fn installer(folder: &Path, index: &Index, limits: InstallLimits) -> Installer {
    let store = Store::open(&folder.join("packages")).unwrap();
    Installer::new(Arc::new(store), index.settings(), limits)
}

/// uv as the environment was built with it.
fn uv() -> PathBuf {
    let _ = host_python("minimal");
    let named = std::env::var_os("CELLBLOCK_UV").map(PathBuf::from);
    let on_path = std::env::var_os("PATH").map_or(Vec::new(), |path| {
        std::env::split_paths(&path)
            .map(|folder| folder.join("uv"))
            .collect::<Vec<_>>()
    });
    let own = data_folder().join("tools/uv");
    named
        .into_iter()
        .chain(on_path)
        .chain([own])
        .find(|path| path.is_file())
        .expect("building an environment brought uv")
}

fn packages(listed: &[PackageVersion]) -> Vec<String> {
    listed.iter().map(PackageVersion::to_string).collect()
}

#[test]
fn a_wheel_and_what_it_needs_are_installed_each_into_a_folder_of_its_own() {
    let bench = Bench::new();
    let installed = bench
        .install(&["Tool.Kit>=1", "missing; python_version < '3'"], &[])
        .unwrap();
    assert_eq!(packages(&installed.added), ["pure-2.0", "tool-kit-1.5"]);
    assert_eq!(
        installed.text,
        "Successfully installed pure-2.0 tool-kit-1.5"
    );
    assert_eq!(
        bench.python(&installed, "import tool_kit; tool_kit.main()"),
        "tool 2"
    );
    let versions =
        "from importlib.metadata import version; print(version('tool-kit'), version('pure'))";
    assert_eq!(bench.python(&installed, versions), "1.5 2.0");
    let folders = bench.folders(&installed);
    assert!(
        folders[0].join("pure/__init__.py").is_file() && !folders[0].join("tool_kit.py").exists()
    );
    assert!(folders[1].join("tool_kit.py").is_file() && !folders[1].join("pure").exists());
    let steps = [
        "resolving packages",
        "downloading 2 packages",
        "adding pure 2.0 (1 of 2)",
        "adding tool-kit 1.5 (2 of 2)",
    ];
    assert_eq!(*bench.told.lock().unwrap(), steps);
}

#[test]
fn a_uv_that_does_not_run_where_it_is_needed_says_so() {
    let mut bench = Bench::new();
    bench.build_sandboxes = Plain::new(Path::new("/no/such/uv"), &host_python("minimal"));
    let said = bench.refusal(&["pure"], &[]);
    assert!(
        said.contains("does not run here") && said.contains("GNU C library"),
        "{said}"
    );
}

#[test]
fn bytecode_comes_along_and_is_used_although_files_were_moved() {
    let bench = Bench::new();
    let installed = bench.install(&["pure==1.0"], &[]).unwrap();
    let folder = &bench.folders(&installed)[0];
    assert_eq!(
        std::fs::read_to_string(folder.join("pure/data/table.txt")).unwrap(),
        "data\n"
    );
    let compiled: Vec<_> = std::fs::read_dir(folder.join("pure/__pycache__"))
        .unwrap()
        .flatten()
        .collect();
    let bytecode = std::fs::read(compiled[0].path()).unwrap();
    assert_eq!(
        (compiled.len(), bytecode[4]),
        (1, 1),
        "the source is never looked at again"
    );
    let shown = bench.python(
        &installed,
        "import pure; print(pure.__cached__, pure.__file__)",
    );
    assert_eq!(
        shown,
        format!(
            "{} {}",
            compiled[0].path().display(),
            folder.join("pure/__init__.py").display()
        )
    );
}

#[test]
fn a_script_is_a_program_that_names_the_python_inside() {
    let bench = Bench::new();
    let installed = bench
        .install(&["tool-kit[more]", "pure==1.0"], &[])
        .unwrap();
    assert_eq!(
        packages(&installed.added),
        ["leaf-0.1", "pure-1.0", "tool-kit-1.5"],
        "extras and versions count"
    );
    let script = bench.folders(&installed)[2].join("bin/tool-kit");
    let paths: Vec<_> = bench
        .folders(&installed)
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let (status, output, errors) =
        finished(Command::new(&script).env("PYTHONPATH", paths.join(":")));
    assert_eq!((status, output.trim()), (Some(0), "tool 1"), "{errors}");
}

#[test]
fn the_second_installation_downloads_nothing() {
    let bench = Bench::new();
    let timed = |installer: &Installer| {
        bench.index.forget_requests();
        let started = Instant::now();
        let installed = bench.install_with(installer, &["tool-kit"], &[]).unwrap();
        (installed, started.elapsed(), bench.index.requests())
    };
    let (first, cold, seen) = timed(&bench.installer);
    assert!(
        seen.iter()
            .any(|path| path.ends_with("tool_kit-1.5-py3-none-any.whl")),
        "{seen:?}"
    ); // control
    let (again, warm, seen) = timed(&bench.installer);
    assert_eq!(
        (&again, seen.len()),
        (&first, 0),
        "the answer is known and the trees are there"
    );
    let other_server = bench.another_server();
    let (elsewhere, resolved, seen) = timed(&other_server);
    assert_eq!(elsewhere, first);
    let build_sandboxes = bench.build_sandboxes.opened();
    assert_eq!(
        build_sandboxes, 2,
        "the first server needed one sandbox, the other one only to resolve; {seen:?}"
    );
    println!("first {cold:?}; again {warm:?}; in another server, which must resolve, {resolved:?}");
}

#[test]
fn what_the_session_has_stays_as_it_is_unless_it_is_named() {
    let bench = Bench::new();
    let has = [("pure", "1.0")];
    let kept = bench.install(&["tool-kit"], &has).unwrap();
    assert_eq!(
        (packages(&kept.added), packages(&kept.already)),
        (vec!["tool-kit-1.5".to_owned()], vec!["pure-1.0".to_owned()])
    );
    let satisfied = bench.install(&["pure>=1,<2"], &has).unwrap();
    assert_eq!(satisfied.text, "Requirement already satisfied: pure (1.0)");
    let replaced = bench.install(&["pure==2.0"], &has).unwrap();
    assert_eq!(packages(&replaced.added), ["pure-2.0"]);
    let said = bench.refusal(&["modern"], &has);
    assert!(
        said.contains("modern") && said.contains("pure==1.0"),
        "{said}"
    );
    assert!(
        said.contains("The session has pure 1.0 already; name it in the request too"),
        "{said}"
    );
    let both = bench.install(&["modern", "pure>=1.5"], &has).unwrap(); // control: the advice helps
    assert_eq!(packages(&both.added), ["modern-1.0", "pure-2.0"]);
}

#[test]
fn a_source_package_is_built_with_a_backend_of_the_index_and_belongs_to_its_session() {
    let bench = Bench::new();
    let one = bench.install(&["from-source"], &[]).unwrap();
    assert_eq!(
        (one.text.as_str(), one.private.len()),
        ("Successfully installed from-source-1.0", 1)
    );
    assert_eq!(
        bench.python(&one, "import from_source; print(from_source.value)"),
        "7"
    );
    assert!(
        bench
            .index
            .requests()
            .iter()
            .any(|path| path.contains("small_backend-1.0")),
        "the backend came from there"
    );
    let two = bench.install(&["from-source"], &[]).unwrap();
    assert_ne!(one.paths, two.paths);
    assert_eq!(
        bench.build_sandboxes.opened(),
        4,
        "each build has a sandbox of its own"
    );
    let said = bench.refusal(&["failing"], &[]);
    assert!(
        said.contains("failing") && said.contains("not enough values to unpack"),
        "{said}"
    );
}

#[test]
fn where_builds_are_refused_the_resolver_says_what_is_missing() {
    let bench = Bench::with(Manner::Open, |limits| {
        limits.builds = cellblock::packages::Builds::Refused
    });
    let said = bench.refusal(&["from-source"], &[]);
    assert!(
        said.contains("no usable wheels") && said.contains("not built from source here"),
        "{said}"
    );
    bench.install(&["leaf"], &[]).unwrap(); // control
}

#[test]
fn the_resolvers_words_are_kept() {
    let bench = Bench::new();
    let said = bench.refusal(&["there-is-no-such-package"], &[]);
    assert!(
        said.contains("there-is-no-such-package was not found"),
        "{said}"
    );
    let said = bench.refusal(&["pure>=3"], &[]);
    assert!(
        said.contains("pure<=2.0") || said.contains("pure>=3"),
        "{said}"
    );
    assert!(
        !said.contains("/tmp") && !said.contains("cell.py"),
        "no path of the sandbox: {said}"
    );
}

#[test]
fn a_file_that_is_not_what_the_index_says_is_refused() {
    let bench = Bench::new();
    let said = bench.refusal(&["exchanged"], &[]);
    assert!(said.to_lowercase().contains("hash mismatch"), "{said}");
    assert!(bench.refusal(&["broken"], &[]).contains("broken"));
    assert!(bench.installer.store().list().unwrap().is_empty());
    bench.install(&["leaf"], &[]).unwrap(); // control
}

#[test]
fn a_wheel_cannot_write_outside_and_nothing_in_it_runs() {
    let bench = Bench::new();
    let installed = bench.install(&["escaping"], &[]).unwrap();
    let folder = &bench.folders(&installed)[0];
    let found = Command::new("find")
        .arg(bench.folder.path())
        .args(["-name", "escap*.py"])
        .output()
        .unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    assert_eq!(
        found.trim(),
        folder.join("escaping.py").display().to_string(),
        "and nothing else anywhere"
    );
    assert!(!bench.build_sandboxes.left_behind("escaped.py"));
    let installed = bench.install(&["startup"], &[]).unwrap();
    assert_eq!(
        bench.python(&installed, "import startup; print('fine')"),
        "fine",
        "a .pth file is only a file"
    );
}

#[test]
fn an_installation_that_is_too_large_is_refused() {
    let bench = Bench::with(Manner::Open, |limits| limits.bytes = 1 << 20);
    assert!(bench.refusal(&["huge"], &[]).contains("larger than 1 MiB"));
    assert!(bench.installer.store().list().unwrap().is_empty());
    bench.install(&["leaf"], &[]).unwrap(); // control
}

#[test]
fn a_password_of_the_index_opens_it_and_is_found_nowhere_afterwards() {
    let bench = Bench::with(Manner::Password, |_| {});
    let installed = bench.install(&["tool-kit"], &[]).unwrap();
    assert_eq!(installed.added.len(), 2);
    let said = bench.refusal(&["there-is-no-such-package"], &[]);
    let everything = format!("{installed:?} {said} {:?}", bench.installer.index());
    assert!(!everything.contains(PASSWORD), "{everything}");
    let store = bench.installer.store().trees();
    let found = Command::new("grep")
        .args(["-rl", PASSWORD])
        .arg(store.parent().unwrap())
        .output()
        .unwrap();
    assert!(
        found.stdout.is_empty(),
        "{}",
        String::from_utf8_lossy(&found.stdout)
    );
    assert!(
        bench
            .refusal(&["from-source"], &[])
            .contains("where the index needs a password")
    );
    let mut without = bench.index.settings();
    without.index_url = IndexUrl::parse(&bench.index.url_without_password()).unwrap();
    let store = Arc::clone(bench.installer.store());
    let refused = bench.install_with(
        &Installer::new(store, without, InstallLimits::default()),
        &["leaf"],
        &[],
    );
    assert!(refused.is_err(), "the index asks for it"); // control
}

#[test]
fn a_wheel_is_installed_from_its_address_over_tls_with_the_operators_certificates() {
    let Some(tls) = index::Tls::start(&host_python("minimal")) else {
        return skipped("openssl");
    };
    let bench = Bench::new();
    let mut settings = bench.index.settings();
    settings.ca_file = Some(tls.certificate());
    let store = Arc::clone(bench.installer.store());
    let trusting = Installer::new(store, settings, InstallLimits::default());
    let wheel = tls.url("pure/pure-1.0-py3-none-any.whl");
    let installed = bench
        .install_with(&trusting, &[&format!("pure @ {wheel}")], &[("pure", "1.0")])
        .unwrap();
    assert_eq!(
        packages(&installed.added),
        ["pure-1.0"],
        "an address is not satisfied by a version"
    );
    assert!(installed.private.is_empty());
    let origin = bench.folders(&installed)[0].join("pure-1.0.dist-info/direct_url.json");
    assert!(
        !origin.exists(),
        "who gets the same file does not learn where somebody else found it"
    );
    assert!(origin.with_file_name("METADATA").is_file()); // control
    let again = bench.install_with(&trusting, &[&wheel], &[]).unwrap();
    assert_eq!(
        again.paths, installed.paths,
        "the same file is the same tree"
    );
    let by_name = bench.install(&["pure==1.0"], &[]).unwrap();
    assert!(
        bench
            .index
            .requests()
            .iter()
            .any(|path| path.ends_with(".whl")),
        "for a name the index is asked"
    );
    assert_eq!(packages(&by_name.added), ["pure-1.0"]);
    let archive = tls.url("from-source/from_source-1.0.tar.gz");
    let built = bench.install_with(&trusting, &[&archive], &[]).unwrap();
    assert_eq!(
        (built.text.as_str(), built.private.len()),
        ("Successfully installed from-source-1.0", 1)
    );
    let said = bench.refusal(&[&wheel], &[]);
    assert!(
        said.to_lowercase().contains("certificate"),
        "without the file nobody trusts the host: {said}"
    ); // control
}

#[test]
fn a_version_of_long_ago_is_not_built_because_a_package_is_in_the_way_of_the_newest() {
    let bench = Bench::new();
    let present = [("pure", "2.0")];
    let said = bench.refusal(&["outgrown"], &present);
    assert!(
        said.contains("can be used with pure 2.0, which the session has"),
        "{said}"
    );
    assert!(
        said.contains("install \"outgrown==3.0\", \"pure==1.0\" together"),
        "{said}"
    );
    let together = bench
        .install(&["outgrown==3.0", "pure==1.0"], &present)
        .unwrap();
    assert_eq!(
        packages(&together.added),
        ["outgrown-3.0", "pure-1.0"],
        "the way out leads there"
    );
    // Controls: nothing is in the way; the old one is asked for.
    assert_eq!(
        packages(&bench.install(&["outgrown"], &[]).unwrap().added),
        ["outgrown-3.0", "pure-1.0"]
    );
    let old = bench.install(&["outgrown<1"], &present).unwrap();
    assert_eq!(
        (packages(&old.added), old.private.len()),
        (vec!["outgrown-0.1".to_owned()], 1)
    );
}

#[test]
fn a_trusted_host_needs_no_certificate_that_anybody_knows() {
    let Some(tls) = index::Tls::start(&host_python("minimal")) else {
        return skipped("openssl");
    };
    let bench = Bench::new();
    let wheel = tls.url("pure/pure-1.0-py3-none-any.whl");
    let trusting = |host: &str| {
        let settings = IndexSettings {
            trusted_hosts: vec![host.to_owned()],
            ..bench.index.settings()
        };
        Installer::new(
            Arc::clone(bench.installer.store()),
            settings,
            InstallLimits::default(),
        )
    };
    // Control: trust in another host is none in this one.
    let refused = bench
        .install_with(&trusting("127.0.0.2"), &[&wheel], &[])
        .unwrap_err();
    assert!(
        refused.to_string().to_lowercase().contains("certificate"),
        "{refused}"
    );
    let installed = bench
        .install_with(&trusting("127.0.0.1"), &[&wheel], &[])
        .unwrap();
    assert_eq!(packages(&installed.added), ["pure-1.0"]);
}

#[test]
fn uv_itself_says_which_index_it_uses() {
    let bench = Bench::new();
    let home = tempfile::tempdir().unwrap();
    let variables = |more: &[(&str, &str)]| -> BTreeMap<String, String> {
        let own = [
            ("PATH", "/usr/bin:/bin"),
            ("HOME", home.path().to_str().unwrap()),
        ];
        own.iter()
            .chain(more)
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    };
    let read = |more: &[(&str, &str)]| {
        run(IndexSettings::read(
            &uv(),
            &host_python("minimal"),
            &variables(more),
        ))
    };
    let url = bench.index.url_without_password();
    let settings = read(&[("UV_DEFAULT_INDEX", &url)]).unwrap();
    assert_eq!(settings.index_url, IndexUrl::parse(&url).unwrap());
    let place = url
        .trim_start_matches("http://")
        .trim_end_matches("/simple");
    assert_eq!(settings.rules(), [place]);
    let settings = read(&[
        ("UV_DEFAULT_INDEX", &url),
        ("UV_INDEX", "other=http://me:pw@127.0.0.1:1/simple"),
        ("UV_INSECURE_HOST", "a.example b.example"),
        ("SSL_CERT_FILE", "/etc/ca.pem"),
        ("UV_HTTP_RETRIES", "0"),
    ]);
    // The other index cannot be reached, but nothing has to be fetched to know this much.
    let settings = settings.unwrap();
    assert_eq!(
        settings.extra_index_urls,
        [IndexUrl::parse("http://me:pw@127.0.0.1:1/simple").unwrap()]
    );
    assert_eq!(settings.trusted_hosts, ["a.example", "b.example"]);
    assert_eq!(settings.ca_file.as_deref(), Some(Path::new("/etc/ca.pem")));
    let folder = home.path().join(".config/uv");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(
        folder.join("uv.toml"),
        format!("[[index]]\nurl = \"{url}\"\ndefault = true\n"),
    )
    .unwrap();
    assert_eq!(
        read(&[]).unwrap().index_url,
        IndexUrl::parse(&url).unwrap(),
        "its settings file counts too"
    );
}

#[test]
fn where_an_index_keeps_its_files_is_asked_once_and_remembered() {
    let bench = Bench::new();
    let memory = tempfile::tempdir().unwrap();
    let url = bench.index.url_without_password();
    let variables = BTreeMap::from([("UV_DEFAULT_INDEX".to_owned(), url.clone())]);
    let python = host_python("minimal");
    let find = || {
        let mut settings = run(IndexSettings::read(&uv(), &python, &variables)).unwrap();
        bench.index.forget_requests();
        let how = run(settings.find_file_hosts(&uv(), &python, &variables, memory.path()));
        (how, bench.index.requests().len(), settings)
    };
    let place = url
        .trim_start_matches("http://")
        .trim_end_matches("/simple");
    let (how, requests, settings) = find();
    assert_eq!(
        settings.file_hosts,
        [place],
        "its pages say where its files are"
    );
    assert!(
        how == FileHosts::Asked && requests > 0,
        "{how:?}, {requests} requests"
    );
    let (how, requests, settings) = find();
    assert_eq!(
        (how, requests, settings.file_hosts.len()),
        (FileHosts::Remembered, 0, 1)
    );
    settings.forget_file_hosts(memory.path());
    assert_eq!(find().0, FileHosts::Asked);
}

#[test]
fn a_password_in_netrc_opens_the_index_and_stays_out_of_addresses_and_of_the_disk() {
    let bench = Bench::with(Manner::Password, |_| {});
    let home = tempfile::tempdir().unwrap();
    std::fs::write(
        home.path().join(".netrc"),
        format!("machine 127.0.0.1 login someone password {PASSWORD}\n"),
    )
    .unwrap();
    let mut variables = BTreeMap::from([(
        "UV_DEFAULT_INDEX".to_owned(),
        bench.index.url_without_password(),
    )]);
    let install = |variables: &BTreeMap<String, String>| {
        let settings = run(IndexSettings::read(
            &uv(),
            &host_python("minimal"),
            variables,
        ))
        .unwrap();
        assert!(!format!("{settings:?}").contains(PASSWORD));
        let store = Arc::new(Store::open(&bench.folder.path().join("other")).unwrap());
        bench.install_with(
            &Installer::new(store, settings, InstallLimits::default()),
            &["pure"],
            &[],
        )
    };
    install(&variables).expect_err("without a password it stays closed"); // control
    variables.insert("HOME".to_owned(), home.path().display().to_string());
    assert_eq!(packages(&install(&variables).unwrap().added), ["pure-2.0"]);
}
