//! What a session in a container reaches: nothing, or what the operator lists.

use cellblock::session::Refused;

use super::on_docker;
use crate::network::{HERE, Web, blocked, listed, names, network};
use crate::support::native;
use crate::support::{is_root, skipped};

/// Asks a server for a page, and says what came of it.
const ASK: &str = "
import urllib.request
def ask(address):
    try:
        return urllib.request.urlopen(address, timeout=20).read().decode()
    except OSError as error:
        return type(error).__name__
";

#[test]
fn a_listed_name_is_reached_and_nothing_else_is() {
    on_docker(async |engine| {
        if !is_root() {
            return skipped("root (doors of containers)");
        }
        let (web, names) = (Web::start(), names());
        let port = web.port();
        let rules = listed(&[format!("web.test:{port}"), format!("{HERE}:{port}")]);
        let containers = engine.build().network(network(rules, names)).start();
        let session = containers.session();
        session.ok(ASK).await;
        assert_eq!(session.ok(&format!("print(ask('http://web.test:{port}/'))")).await, "hello\n");
        let by_program = format!(
            "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', \"import urllib.request; print(urllib.request.urlopen('http://web.test:{port}/').read())\"], capture_output=True, text=True).stdout)"
        );
        assert_eq!(session.ok(&by_program).await, "b'hello'\n\n");
        let refused = session.execute(&format!("print(ask('http://other.test:{port}/'))")).await.unwrap();
        assert_eq!(native::printed(&refused), "URLError\n");
        assert!(blocked(&refused).iter().any(|line| line.contains("other.test")), "{refused:?}");
        assert_eq!(session.ok("print(ask('http://192.0.2.1/'))").await, "URLError\n");
        assert_eq!(web.asked(), 2);
        // A fork goes through the same doors.
        let fork = session.fork().await;
        assert_eq!(fork.ok(&format!("print(ask('http://web.test:{port}/'))")).await, "hello\n");
        containers.end().await;
    });
}

#[test]
fn rules_that_cannot_be_kept_start_no_session() {
    on_docker(async |engine| {
        let Some(runtimes) = engine.runtimes().contains("runsc").then_some("runsc") else {
            return skipped("gVisor (runsc)");
        };
        let rules = listed(&["web.test:80"]);
        let containers = engine.build().runtime(runtimes).network(network(rules, names())).start();
        let refused = containers.session().execute("1").await.unwrap_err();
        assert!(
            matches!(&refused, Refused::Launch(why) if why.to_string().contains("cannot be enforced here")),
            "{refused}"
        );
        containers.end().await;
    });
}
