//! What the operator has to do with packages: the settings that say where they come from, and the
//! commands for the store.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::index::{Index, Manner};
use super::proxy::Proxy;
use crate::support::native::host_python;
use crate::support::server::{Era, MINIMAL, Server, finished, program_below};
use crate::support::{SmallDisk, data_folder};

/// A data folder with the shared environments and a store of its own, and a home folder beside it.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let _ = host_python("minimal");
        let place = Place(tempfile::tempdir().unwrap());
        for name in ["data", "home/.config"] {
            fs::create_dir_all(place.0.path().join(name)).unwrap();
        }
        // Ordinary users' sessions must get through to what is shown to them.
        fs::set_permissions(place.0.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for shared in ["environments", "runner", "tools"] {
            std::os::unix::fs::symlink(data_folder().join(shared), place.data().join(shared))
                .unwrap();
        }
        place
    }

    fn data(&self) -> PathBuf {
        self.0.path().join("data")
    }

    fn home(&self) -> PathBuf {
        self.0.path().join("home")
    }

    fn program(&self, arguments: &[&str]) -> Command {
        let mut command = program_below(&self.data());
        command
            .args(arguments)
            .env("HOME", self.home())
            .env_remove("PIP_FIND_LINKS");
        command.env("XDG_CONFIG_HOME", self.home().join(".config"));
        command
    }

    fn server(&self, change: impl FnOnce(&mut Command)) -> Server {
        let mut command = self.program(&["mcp"]);
        command.args(MINIMAL);
        change(&mut command);
        let server = Server::spawn(&mut command, Era::Initialize);
        server.greet();
        server
    }

    fn says(&self, arguments: &[&str]) -> String {
        let (status, output, errors) = finished(&mut self.program(arguments));
        assert_eq!(status, Some(0), "{errors}");
        output
    }

    fn list(&self) -> Vec<Value> {
        serde_json::from_str(&self.says(&["packages", "list", "--json"])).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Stored folders are read-only; without root's rights nothing could be removed from them.
        let _ = Command::new("chmod")
            .arg("-R")
            .arg("u+rwX")
            .arg(self.data().join("packages"))
            .status();
    }
}

/// Installs a package in a new session and returns what the tool said.
#[track_caller]
fn install(server: &Server, package: &str) -> String {
    let installed = server
        .session()
        .call("install_package", json!({"package_name": package}));
    assert!(!installed.is_error(), "{}", installed.text());
    installed.text().to_owned()
}

fn use_index(index: &Index) -> impl FnOnce(&mut Command) + use<> {
    let url = index.url_without_password();
    move |command| {
        command.env("UV_DEFAULT_INDEX", url);
    }
}

#[test]
fn an_index_at_another_port_is_found_in_the_settings_files_of_uv_and_of_pip() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let url = index.url_without_password();
    let files = [
        (
            "uv/uv.toml",
            format!("[[index]]\nurl = \"{url}\"\ndefault = true\n"),
        ),
        ("pip/pip.conf", format!("[global]\nindex-url = {url}\n")),
    ];
    for (path, text) in files {
        let place = Place::new();
        let path = place.home().join(".config").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        index.forget_requests();
        let server = place.server(|_| ());
        assert_eq!(
            install(&server, "pure"),
            "Successfully installed pure-2.0",
            "{}",
            path.display()
        );
        assert!(!index.requests().is_empty());
    }
}

#[test]
fn an_index_is_reached_through_the_proxy_that_variables_name() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let proxy = Proxy::start(&index.place());
    let place = Place::new();
    // Nobody but the proxy knows this name.
    let server = place.server(|command| {
        command
            .env("UV_DEFAULT_INDEX", "http://index.example/simple")
            .env("HTTP_PROXY", proxy.url());
        command.env_remove("NO_PROXY").env_remove("no_proxy");
    });
    assert_eq!(install(&server, "pure"), "Successfully installed pure-2.0");
    assert!(
        proxy.hosts().iter().all(|host| host == "index.example") && !proxy.hosts().is_empty(),
        "{:?}",
        proxy.hosts()
    );
    let refused = server
        .session()
        .call("install_package", json!({"package_name": "from_source"}));
    assert!(
        refused.is_error() && refused.text().contains("proxy"),
        "{}",
        refused.text()
    );
}

#[test]
fn the_store_is_listed_and_cleaned_of_what_no_session_uses() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let place = Place::new();
    assert_eq!(
        place.says(&["packages", "list"]),
        "no packages were installed yet\n"
    );
    let server = place.server(use_index(&index));
    install(&server, "tool-kit");
    let listed = place.list();
    let shown: Vec<_> = listed
        .iter()
        .map(|tree| (&tree["package"], &tree["version"], &tree["in_use"]))
        .collect();
    assert_eq!(
        shown,
        [
            (&json!("pure"), &json!("2.0"), &json!(true)),
            (&json!("tool-kit"), &json!("1.5"), &json!(true))
        ]
    );
    assert!(
        place
            .says(&["packages", "clean"])
            .starts_with("removed 0 packages")
    );
    assert_eq!(place.list().len(), 2);
    drop(server);
    let text = place.says(&["packages", "list"]);
    assert!(
        text.starts_with("pure 2.0 ") && text.contains("used just now"),
        "{text}"
    );
    assert!(text.ends_with(" of 20 GiB\n"), "{text}");
    assert!(
        place
            .says(&["packages", "clean"])
            .starts_with("removed 2 packages, ")
    );
    assert_eq!(place.list(), Vec::<Value>::new());
}

#[test]
fn cleanup_removes_what_it_names_and_packages_only_when_that_is_confirmed() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let place = Place::new();
    assert_eq!(
        place.says(&["cleanup"]),
        "no package is unused; nothing was removed\n"
    );
    let server = place.server(use_index(&index));
    install(&server, "pure");
    assert_eq!(
        place.says(&["cleanup", "--yes"]),
        "no package is unused; nothing was removed\n"
    );
    drop(server);
    // An image is named, so that containers are meant; here no engine can be asked for them.
    let nowhere = format!("unix://{}", place.home().join("no.sock").display());
    let (status, _, errors) = finished(
        place
            .program(&["cleanup", "-a", "a/b:c"])
            .env("DOCKER_HOST", nowhere),
    );
    assert_eq!((status, place.list().len()), (Some(2), 1), "{errors}");
    let unasked = place.says(&["cleanup"]);
    assert!(
        unasked.starts_with("1 package (") && unasked.contains("nothing was removed"),
        "{unasked}"
    );
    assert_eq!(place.list().len(), 1);
    assert!(
        place
            .says(&["cleanup", "--yes"])
            .starts_with("removed 1 package, ")
    );
    assert_eq!(place.list(), Vec::<Value>::new());
}

#[test]
fn a_package_that_was_changed_on_disk_is_told_by_doctor_and_replaced_by_the_next_installation() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let place = Place::new();
    let server = place.server(use_index(&index));
    install(&server, "pure");
    assert!(!place.says(&["doctor"]).contains("changed on disk")); // control
    let tree = place.list()[0]["tree"].as_str().unwrap().to_owned();
    let file = place
        .data()
        .join("packages/trees")
        .join(tree)
        .join("pure/__init__.py");
    let content = fs::read_to_string(&file).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(&file, content.replace('=', "~")).unwrap();
    let said = place.says(&["doctor"]);
    assert!(said.contains("changed on disk: pure 2.0"), "{said}");
    install(&server, "pure");
    assert_eq!(fs::read_to_string(&file).unwrap(), content);
    assert!(!place.says(&["doctor"]).contains("changed on disk"));
}

#[test]
fn a_full_store_makes_room_by_removing_what_no_session_uses() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let place = Place::new();
    let limited = |command: &mut Command| {
        use_index(&index)(command);
        command.env("CELLBLOCK_PACKAGE_STORE_SIZE", "1M");
    };
    let big = big_tree(&place.data().join("packages"));
    assert_eq!(place.list().len(), 1); // control
    let server = place.server(limited);
    install(&server, "leaf");
    let left: Vec<Value> = place
        .list()
        .iter()
        .map(|tree| tree["package"].clone())
        .collect();
    assert_eq!(left, [json!("leaf")]);
    assert!(!big.exists());
}

#[test]
fn a_store_without_disk_space_says_so_and_works_once_there_is_room() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let place = Place::new();
    let store = place.data().join("packages");
    fs::create_dir(&store).unwrap();
    let Some(disk) = SmallDisk::on(&store, "size=256k,mode=0711") else {
        return;
    };
    let server = place.server(use_index(&index));
    install(&server, "leaf");
    let ballast = disk.fill();
    let refused = server
        .session()
        .call("install_package", json!({"package_name": "pure"}));
    refused.assert_refused(&["No space left on device"]);
    assert_eq!(place.list().len(), 1, "no half tree is left");
    fs::remove_file(ballast).unwrap();
    install(&server, "pure");
    assert_eq!(place.list().len(), 2);
    server.finish();
}

#[test]
fn a_list_of_rubbish_in_the_store_is_replaced() {
    let index = Index::start(&host_python("minimal"), Manner::Open);
    let place = Place::new();
    let server = place.server(use_index(&index));
    install(&server, "pure");
    server.finish();
    let lists = fs::read_dir(place.data().join("packages/index"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let lists: Vec<PathBuf> = lists.collect();
    assert!(!lists.is_empty(), "the control: there is one");
    for list in lists {
        fs::remove_file(&list).unwrap();
        fs::write(&list, [0, 255, b'\n', b'{']).unwrap();
    }
    let server = place.server(use_index(&index));
    let session = server.session();
    let installed = session.call("install_package", json!({"package_name": "pure"}));
    assert!(!installed.is_error(), "{}", installed.text());
    assert_eq!(session.text("import pure; pure.__name__"), "'pure'");
    drop(session);
    server.finish();
}

/// Puts a package of two megabytes into a store, and returns its folder.
fn big_tree(store: &Path) -> PathBuf {
    use cellblock::packages::{Bounds, Sharing, Store};
    let content = "x".repeat(2 << 20);
    let header =
        json!({"path": "big-1.0.dist-info/METADATA", "size": content.len(), "program": false});
    let stream = format!("{header}\n{content}{}\n", json!({"end": 1}));
    let bounds = Bounds {
        files: 10,
        bytes: 4 << 20,
    };
    let store = Store::open(store).unwrap();
    let tree = store
        .add(stream.as_bytes(), bounds, Sharing::Shared)
        .unwrap();
    store.trees().join(tree.name.as_str())
}
