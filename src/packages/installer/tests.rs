//! Tests of installations with a fake sandbox, which gives correct, wrong or no replies as each
//! test requires.

use std::collections::VecDeque;
use std::io::{Seek, Write};

use async_trait::async_trait;
use serde_json::{Value, json};

use super::super::store::tests::Bench as StoreBench;
use super::super::stream::tests::stream;
use super::super::{IndexUrl, Proxies};
use super::*;

/// Results of runs inside: the reply and other files. `None`: the run never ends.
type ScriptedReplies = Arc<Mutex<VecDeque<Option<Vec<(String, Vec<u8>)>>>>>;

#[derive(Default, Clone)]
struct Fake {
    script: ScriptedReplies,
    rules: Arc<Mutex<Vec<Vec<String>>>>,
    requests: Arc<Mutex<Vec<Value>>>,
}

struct FakeBuildSandbox {
    fake: Fake,
    files: HashMap<String, Vec<u8>>,
}

#[async_trait]
impl BuildSandboxes for Fake {
    async fn open(&self, rules: &[String]) -> Result<Box<dyn BuildSandbox>, PackageError> {
        self.rules.lock().unwrap().push(rules.to_vec());
        Ok(Box::new(FakeBuildSandbox {
            fake: self.clone(),
            files: HashMap::new(),
        }))
    }
}

#[async_trait]
impl BuildSandbox for FakeBuildSandbox {
    fn uv(&self) -> String {
        "/tools/uv".to_owned()
    }

    async fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PackageError> {
        self.files.insert(name.to_owned(), content);
        Ok(())
    }

    async fn run(&mut self, code: &str, _: Duration) -> Result<String, PackageError> {
        assert_eq!(code, INSTALLER);
        self.fake
            .requests
            .lock()
            .unwrap()
            .push(serde_json::from_slice(&self.files[REQUEST_FILE]).unwrap());
        let files = self
            .fake
            .script
            .lock()
            .unwrap()
            .pop_front()
            .expect("nothing more should run");
        match files {
            Some(files) => self.files.extend(files),
            None => std::future::pending().await,
        }
        Ok("what was printed".to_owned())
    }

    async fn take(&mut self, name: &str, limit: u64) -> Result<std::fs::File, PackageError> {
        let missing = || PackageError::BuildSandbox {
            why: format!("there is no {name}"),
        };
        let content = self.files.get(name).ok_or_else(missing)?;
        if content.len() as u64 > limit {
            return Err(PackageError::TooLarge { limit });
        }
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file.rewind().unwrap();
        Ok(file)
    }
}

impl Fake {
    fn answers(&self, answer: Value, streams: &[Vec<u8>]) {
        let streams = streams
            .iter()
            .enumerate()
            .map(|(number, stream)| (stream_file(number), stream.clone()));
        let files = streams
            .chain([(ANSWER_FILE.to_owned(), answer.to_string().into_bytes())])
            .collect();
        self.script.lock().unwrap().push_back(Some(files));
    }

    /// Scripts a correct resolver and installer for packages without dependencies.
    fn has(&self, packages: &[(&str, &str)]) {
        self.answers(resolved(packages), &[]);
        self.installs(packages);
    }

    fn installs(&self, packages: &[(&str, &str)]) {
        let packed: Vec<Value> = packages
            .iter()
            .map(|(name, version)| json!({"name": name, "version": version}))
            .collect();
        let streams: Vec<_> = packages
            .iter()
            .map(|(name, version)| package(name, version))
            .collect();
        self.answers(json!(packed), &streams);
    }

    fn opened(&self) -> usize {
        self.rules.lock().unwrap().len()
    }
}

fn resolved(packages: &[(&str, &str)]) -> Value {
    let pin = |(name, version): &(&str, &str)| {
        let hash = TreeKey::new(&[name, version]);
        json!({
            "name": name, "version": version, "url": null,
            "hashes": [format!("sha256:{}", digits(&hash))],
        })
    };
    json!({"tag": "cpython-311", "pins": packages.iter().map(pin).collect::<Vec<_>>()})
}

/// Returns 64 hexadecimal digits. Their value does not matter.
fn digits(key: &TreeKey) -> String {
    format!("{key:?}")
        .chars()
        .filter(char::is_ascii_hexdigit)
        .chain("0".repeat(64).chars())
        .take(64)
        .collect()
}

fn package(name: &str, version: &str) -> Vec<u8> {
    let (module, description) = (
        format!("{name}.py"),
        format!("{name}-{version}.dist-info/METADATA"),
    );
    stream(&[(&module, version), (&description, name)])
}

struct Bench {
    store: StoreBench,
    fake: Fake,
    installer: Installer,
    told: Arc<Mutex<Vec<String>>>,
}

impl Bench {
    fn new() -> Bench {
        Bench::with("http://127.0.0.1:8080/simple", InstallLimits::default())
    }

    fn with(index: &str, limits: InstallLimits) -> Bench {
        let store = StoreBench::new();
        let index = IndexSettings {
            index_url: IndexUrl::parse(index).unwrap(),
            extra_index_urls: Vec::new(),
            file_hosts: Vec::new(),
            trusted_hosts: Vec::new(),
            ca_file: None,
            proxies: Proxies::default(),
        };
        let installer = Installer::new(Arc::new(store.open()), index, limits);
        Bench {
            store,
            fake: Fake::default(),
            installer,
            told: Arc::default(),
        }
    }

    async fn install(&self, request: &PackageRequest) -> Result<InstallResult, PackageError> {
        let told = Arc::clone(&self.told);
        self.installer
            .install(request, &self.fake, &move |step| {
                told.lock().unwrap().push(step.to_string())
            })
            .await
    }

    async fn refusal(&self, request: &PackageRequest) -> String {
        self.install(request)
            .await
            .expect_err("it should be refused")
            .to_string()
    }

    fn kept(&self) -> usize {
        self.installer.store.list().unwrap().len()
    }
}

fn request(requirements: &[&str]) -> PackageRequest {
    let requirements =
        Requirement::parse_all(requirements, |host, _| host == "example.com").unwrap();
    PackageRequest {
        requirements,
        upgrade: false,
        present: vec![PackageVersion::new("numpy", "2.1.0")],
    }
}

#[tokio::test]
async fn a_package_is_resolved_fetched_and_added() {
    let bench = Bench::new();
    bench.fake.has(&[("polars", "1.2.3"), ("narwhals", "2.0")]);
    let installed = bench.install(&request(&["polars>1"])).await.unwrap();
    assert_eq!(
        installed.text,
        "Successfully installed polars-1.2.3 narwhals-2.0"
    );
    assert_eq!(
        installed.added,
        [
            PackageVersion::new("polars", "1.2.3"),
            PackageVersion::new("narwhals", "2.0")
        ]
    );
    assert!(installed.private.is_empty() && installed.already.is_empty());
    let folder = installed.paths[0].strip_prefix(PACKAGES_INSIDE).unwrap();
    assert!(
        bench
            .installer
            .store
            .trees()
            .join(folder)
            .join("polars.py")
            .is_file()
    );
    let told = [
        "resolving packages",
        "downloading 2 packages",
        "adding polars 1.2.3 (1 of 2)",
        "adding narwhals 2.0 (2 of 2)",
    ];
    assert_eq!(*bench.told.lock().unwrap(), told);
    assert_eq!(
        *bench.fake.rules.lock().unwrap(),
        [["127.0.0.1:8080"]],
        "one sandbox, which reaches the index only"
    );
}

#[tokio::test]
async fn the_second_installation_needs_no_sandbox_and_a_restarted_server_only_a_resolver() {
    let bench = Bench::new();
    bench.fake.has(&[("polars", "1.2.3")]);
    let first = bench.install(&request(&["polars"])).await.unwrap();
    let second = bench.install(&request(&["polars"])).await.unwrap();
    assert_eq!((first, bench.fake.opened()), (second.clone(), 1));
    let restarted = Bench {
        installer: Installer::new(
            Arc::new(bench.store.open()),
            bench.installer.index.clone(),
            InstallLimits::default(),
        ),
        ..bench
    };
    restarted
        .fake
        .answers(resolved(&[("polars", "1.2.3")]), &[]);
    assert_eq!(
        restarted.install(&request(&["polars"])).await.unwrap(),
        second
    );
    assert_eq!(restarted.fake.opened(), 2);
}

#[tokio::test]
async fn what_the_session_has_is_not_installed_again() {
    let bench = Bench::new();
    let installed = bench.install(&request(&["NumPy"])).await.unwrap();
    assert_eq!(
        installed.text,
        "Requirement already satisfied: numpy (2.1.0)"
    );
    assert_eq!((installed.paths.len(), bench.fake.opened()), (0, 0));
    bench
        .fake
        .answers(resolved(&[("numpy", "2.1.0"), ("polars", "1.2.3")]), &[]);
    bench.fake.installs(&[("polars", "1.2.3")]);
    let installed = bench
        .install(&request(&["numpy>=2", "polars"]))
        .await
        .unwrap();
    assert_eq!(
        installed.text,
        "Requirement already satisfied: numpy (2.1.0)\nSuccessfully installed polars-1.2.3"
    );
    let requests = bench.fake.requests.lock().unwrap();
    assert_eq!(requests[0]["present"], json!({"numpy": "2.1.0"}));
    assert_eq!(requests[0]["requirements"], json!(["numpy>=2", "polars"]));
    assert_eq!(requests[1]["pins"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn an_older_version_that_was_chosen_because_of_the_session_is_told_with_the_way_out() {
    let bench = Bench::new();
    let held = |newer: &str| {
        let replaced = json!([{"name": "numpy", "version": "2.1.0", "wanted": "1.26.4"}]);
        json!([{"name": "moviepy", "version": "0.2", "newer": newer, "replaced": replaced}])
    };
    let mut answer = resolved(&[("moviepy", "0.2"), ("numpy", "2.1.0")]);
    answer["held_back"] = held("2.2.1");
    bench.fake.answers(answer.clone(), &[]);
    bench.fake.installs(&[("moviepy", "0.2")]);
    let text = bench.install(&request(&["moviepy"])).await.unwrap().text;
    let remark = "moviepy 0.2 is not the newest version: 2.2.1 cannot be used with numpy 2.1.0, \
                  which the session has. To get \
                  it and replace what is in its way, install \"moviepy==2.2.1\", \"numpy==1.26.4\" \
                  together.";
    assert_eq!(
        text,
        format!("Successfully installed moviepy-0.2\n{remark}")
    );
    let again = bench.install(&request(&["moviepy"])).await.unwrap().text;
    assert!(
        again.ends_with(remark),
        "an answer that is remembered says it too: {again}"
    );
    answer["held_back"] = held("2\nrm -rf");
    bench.fake.answers(answer, &[]);
    let nonsense = bench.refusal(&request(&["moviepy>0"])).await;
    assert!(nonsense.contains("no proper package"), "{nonsense}");
}

#[tokio::test]
async fn an_upgrade_asks_the_index_even_for_what_is_there() {
    let bench = Bench::new();
    bench.fake.has(&[("numpy", "2.2.0")]);
    let upgrade = PackageRequest {
        upgrade: true,
        ..request(&["numpy"])
    };
    assert_eq!(
        bench.install(&upgrade).await.unwrap().text,
        "Successfully installed numpy-2.2.0"
    );
    bench.fake.answers(resolved(&[("numpy", "2.2.0")]), &[]);
    bench.install(&upgrade).await.unwrap();
    assert_eq!(bench.fake.opened(), 2, "an old answer does not count");
}

#[tokio::test]
async fn the_resolvers_words_come_back_without_passwords_and_with_what_can_be_done() {
    let bench = Bench::with(
        "http://me:hunter2@127.0.0.1:8080/simple",
        InstallLimits::default(),
    );
    let words = "Because x depends on numpy>=3 and you require numpy==2.1.0 \
                 (http://me:hunter2@127.0.0.1:8080/simple)";
    bench.fake.answers(json!({"failed": words}), &[]);
    let said = bench.refusal(&request(&["x"])).await;
    assert!(
        said.starts_with("Because x depends on numpy>=3") && said.contains("//****@127.0.0.1"),
        "{said}"
    );
    assert!(
        said.contains("The session has numpy 2.1.0 already; name it in the request too"),
        "{said}"
    );
    let variables = &bench.fake.requests.lock().unwrap()[0]["variables"];
    assert_eq!(
        variables["UV_DEFAULT_INDEX"],
        "http://me:hunter2@127.0.0.1:8080/simple"
    ); // control
}

#[tokio::test]
async fn what_has_no_wheel_is_built_in_another_sandbox_and_shared_with_nobody() {
    let bench = Bench::new();
    for _ in 0..2 {
        bench.fake.answers(
            json!({"failed": "x has no usable wheels", "no_wheel": true}),
            &[],
        );
        bench.fake.installs(&[("x", "1.0"), ("y", "1.0")]);
    }
    let first = bench.install(&request(&["x"])).await.unwrap();
    let second = bench.install(&request(&["x"])).await.unwrap();
    assert_eq!((first.private.len(), bench.fake.opened()), (2, 4));
    assert!(
        first.paths.iter().all(|path| !second.paths.contains(path)),
        "each has its own"
    );
    bench.fake.has(&[("y", "1.0")]);
    let shared = bench.install(&request(&["y"])).await.unwrap();
    assert!(
        shared.private.is_empty() && !first.paths.contains(&shared.paths[0]),
        "nothing built is found by others"
    );
}

#[tokio::test]
async fn source_code_is_built_at_once_and_its_host_is_reachable() {
    let bench = Bench::new();
    bench.fake.installs(&[("x", "1.0")]);
    let installed = bench
        .install(&request(&["git+https://example.com/x@main"]))
        .await
        .unwrap();
    assert_eq!(installed.text, "Successfully installed x-1.0");
    assert_eq!(
        *bench.fake.rules.lock().unwrap(),
        [["127.0.0.1:8080", "example.com:443"]]
    );
    assert_eq!(bench.fake.requests.lock().unwrap()[0]["step"], "build");
}

#[tokio::test]
async fn nothing_is_built_where_that_is_refused_or_a_password_could_be_read() {
    let refusing = Bench::with(
        "http://127.0.0.1:8080/",
        InstallLimits {
            builds: Builds::Refused,
            ..InstallLimits::default()
        },
    );
    let secret = Bench::with(
        "http://me:hunter2@127.0.0.1:8080/",
        InstallLimits::default(),
    );
    for bench in [refusing, secret] {
        bench.fake.answers(
            json!({"failed": "x has no usable wheels", "no_wheel": true}),
            &[],
        );
        let said = bench.refusal(&request(&["x"])).await;
        assert!(
            said.starts_with("x has no usable wheels\nPackages are not built from source"),
            "{said}"
        );
        assert!(
            bench
                .refusal(&request(&["https://example.com/x.tar.gz"]))
                .await
                .contains("must be built")
        );
        assert_eq!(bench.fake.opened(), 1);
    }
}

#[tokio::test]
async fn an_answer_that_does_not_fit_the_question_adds_nothing() {
    let asked = [("polars", "1.2.3")];
    let claim = |name: &str| json!({"name": name, "version": "1.2.3"});
    let lies = [
        (json!([claim("numpy")]), package("numpy", "1.2.3")),
        (json!([claim("polars")]), package("numpy", "1.2.3")),
        (
            json!([claim("polars"), claim("numpy")]),
            package("polars", "1.2.3"),
        ),
        (json!([]), package("polars", "1.2.3")),
    ];
    for (claimed, bytes) in lies {
        let bench = Bench::new();
        bench.fake.answers(resolved(&asked), &[]);
        bench.fake.answers(claimed, &[bytes]);
        let said = bench.refusal(&request(&["polars"])).await;
        assert!(said.contains("does not fit"), "{said}");
        bench.fake.installs(&asked);
        // Control: the correct reply is accepted afterwards.
        let installed = bench.install(&request(&["polars"])).await.unwrap();
        assert_eq!(installed.text, "Successfully installed polars-1.2.3");
        assert!(
            bench.fake.script.lock().unwrap().is_empty(),
            "no earlier lie was found in the store"
        );
    }
}

#[tokio::test]
async fn nonsense_from_inside_is_refused() {
    for answer in [
        json!(null),
        json!([]),
        json!({"tag": "x", "pins": [{"name": "--x"}]}),
        json!({"tag": "\n", "pins": []}),
    ] {
        let bench = Bench::new();
        bench.fake.answers(answer, &[]);
        assert!(
            bench
                .refusal(&request(&["polars"]))
                .await
                .contains("does not fit")
        );
    }
    let bench = Bench::new();
    bench
        .fake
        .script
        .lock()
        .unwrap()
        .push_back(Some(Vec::new()));
    let said = bench.refusal(&request(&["polars"])).await;
    assert!(
        said.contains("there is no answer.json") && said.contains("what was printed"),
        "{said}"
    );
}

#[tokio::test]
async fn size_is_bounded_over_all_packages_and_a_refused_build_leaves_nothing() {
    let large = stream(&[("a.py", &"x".repeat(700)), ("a-1.0.dist-info/METADATA", "")]);
    let other = stream(&[("b.py", &"x".repeat(700)), ("b-1.0.dist-info/METADATA", "")]);
    let packed = json!([{"name": "a", "version": "1.0"}, {"name": "b", "version": "1.0"}]);
    for (bytes, fits) in [(1_400, true), (1_399, false)] {
        let bench = Bench::with(
            "http://127.0.0.1:8080/",
            InstallLimits {
                bytes,
                ..InstallLimits::default()
            },
        );
        bench
            .fake
            .answers(packed.clone(), &[large.clone(), other.clone()]);
        let result = bench
            .install(&request(&["git+https://example.com/a"]))
            .await;
        assert_eq!(
            (result.is_ok(), bench.kept()),
            if fits { (true, 2) } else { (false, 0) }
        );
        if let Err(error) = result {
            assert!(
                matches!(error, PackageError::TooLarge { limit: 1_399 }),
                "{error}"
            );
        }
    }
}

#[tokio::test]
async fn what_does_not_fit_at_once_is_fetched_one_by_one() {
    let bench = Bench::new();
    let full = json!({"failed": "No space left on device (os error 28)", "no_room": true});
    bench
        .fake
        .answers(resolved(&[("a", "1.0"), ("b", "2.0")]), &[]);
    bench.fake.answers(full.clone(), &[]);
    bench.fake.installs(&[("a", "1.0")]);
    bench.fake.installs(&[("b", "2.0")]);
    let installed = bench.install(&request(&["a", "b"])).await.unwrap();
    assert_eq!(installed.text, "Successfully installed a-1.0 b-2.0");
    let asked: Vec<usize> = bench
        .fake
        .requests
        .lock()
        .unwrap()
        .iter()
        .filter_map(|request| Some(request["pins"].as_array()?.len()))
        .collect();
    assert_eq!((asked, bench.fake.opened()), (vec![2, 1, 1], 1));

    let bench = Bench::new();
    bench.fake.answers(resolved(&[("a", "1.0")]), &[]);
    bench.fake.answers(full, &[]);
    let said = bench.refusal(&request(&["a"])).await;
    assert!(
        said.contains("more than 4096 MiB of disk") && said.contains("package_disk"),
        "{said}"
    );
}

#[tokio::test]
async fn size_is_bounded_over_packages_that_are_fetched_one_by_one() {
    for (bytes, fits) in [(8, true), (7, false)] {
        let bench = Bench::with(
            "http://127.0.0.1:8080/",
            InstallLimits {
                bytes,
                ..InstallLimits::default()
            },
        );
        bench
            .fake
            .answers(resolved(&[("a", "1.0"), ("b", "2.0")]), &[]);
        bench
            .fake
            .answers(json!({"failed": "full", "no_room": true}), &[]);
        bench.fake.installs(&[("a", "1.0")]);
        bench.fake.installs(&[("b", "2.0")]);
        let result = bench.install(&request(&["a", "b"])).await;
        assert_eq!(result.is_ok(), fits, "{result:?}");
        if let Err(error) = result {
            assert!(error.to_string().contains("package_size"), "{error}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_installation_that_never_ends_is_stopped() {
    let bench = Bench::new();
    bench.fake.script.lock().unwrap().push_back(None);
    let said = bench.refusal(&request(&["polars"])).await;
    assert!(said.contains("longer than 300 s"), "{said}");
}

#[tokio::test]
async fn certificates_of_the_index_go_inside() {
    let mut bench = Bench::new();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"certificate").unwrap();
    bench.installer.index.ca_file = Some(file.path().to_owned());
    bench.fake.has(&[("polars", "1.2.3")]);
    bench.install(&request(&["polars"])).await.unwrap();
    assert_eq!(
        bench.fake.requests.lock().unwrap()[0]["certificates"],
        CERTIFICATES_FILE
    );
    bench.installer.index.ca_file = Some("/nowhere/ca.pem".into());
    assert!(
        bench
            .refusal(&request(&["other"]))
            .await
            .contains("certificates cannot be read")
    );
}

#[test]
fn long_words_are_shortened_in_the_middle_and_control_characters_are_gone() {
    let words: Vec<String> = (0..100).map(|number| format!("line {number}")).collect();
    let short = shortened(&words.join("\n"));
    assert!(
        short.starts_with("line 0\n")
            && short.ends_with("line 99")
            && short.contains("60 lines are left out")
    );
    assert_eq!(short.lines().count(), LINES_KEPT + 1);
    assert_eq!(shortened("a\u{1b}[2Jb\nc"), "a [2Jb\nc");
    assert_eq!(shortened(&"x".repeat(5_000)).len(), MAX_LINE_LENGTH);
}

#[test]
fn a_requirement_that_does_not_apply_is_said_to_need_nothing() {
    let nothing = Chosen {
        trees: Vec::new(),
        already: Vec::new(),
        held_back: Vec::new(),
    };
    let report = report(&request(&["tomli; python_version < '3'"]), nothing);
    assert!(
        report.text.starts_with("Nothing had to be installed"),
        "{}",
        report.text
    );
}
