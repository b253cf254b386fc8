//! A session that controls its twin (its snapshot process) gains nothing beyond its family.
//!
//! Twins never execute the contents of their memory. If a session finds a way around that, the twin
//! must be worthless: it has rights in the user namespace of its own family and nowhere else. The
//! program is built for these tests so that it gives a session its twin (`twin.py`), which the
//! session then drives.

use serde_json::json;

use crate::posture::Ordinary;
use crate::support::server::{Era, Server, Session};
use crate::support::skipped;

const DRIVER: &str = include_str!("twin.py");

/// Makes every attempt with the twin of this session, beside a neighbour that holds a secret and
/// must not be affected.
fn attack(server: &Server, hostile: &Session<'_>) {
    let neighbour = server.session();
    neighbour.text("open('secret.txt', 'w').write('the-secret-of-another'); x = 'alive'");
    hostile.text("open('own.txt', 'w').write('my-own')");
    hostile.text(DRIVER);
    hostile.text("prepare()");
    // Copying the session releases the twin. With undo, that has happened after the last cell.
    hostile.call(
        "fork_session",
        json!({"names": [format!("{}-copy", hostile.id)]}),
    );

    // Control: the twin makes these calls, not this interpreter, and it has rights that this one
    // lacks.
    let names = "print(twin(102), twin(39) != os.getpid(), read('/work/own.txt'))";
    assert_eq!(hostile.text(names).trim(), "1000 True my-own");
    // Control: it can make a call that changes namespaces; a session cannot.
    let unshare = "print(twin(272, 0x02000000), ctypes.CDLL(None).unshare(0x02000000))";
    assert_eq!(hostile.text(unshare).trim(), "0 -1");

    // It sees the processes of its family, all of them with its own user, and no files of others.
    let visible = "
pids = [pid for pid in range(1, 3000) if twin(62, pid, 0) != -3]
print(len(pids))
for pid in pids:
    for path in ('root/work/secret.txt', 'cwd/secret.txt', 'root/proc/1/root/work/secret.txt'):
        found = read(f'/proc/{pid}/{path}')
        if isinstance(found, str): print('FOUND', pid, path, found)
";
    let seen = hostile.text(visible);
    let count: usize = seen
        .lines()
        .next()
        .and_then(|line| line.parse().ok())
        .unwrap_or_else(|| panic!("{seen}"));
    assert!(
        count > 3,
        "control: the family's first process, an init, an interpreter, the twin: {seen}"
    );
    assert!(!seen.contains("FOUND"), "{seen}");

    // The first process of the family cannot be opened or killed, and no descriptor can be taken
    // from it.
    let first = "
handle = twin(434, 1, 0)
print(handle >= 0, [twin(438, handle, number, 0) for number in range(12)] == [-1] * 12, twin(62, \
1, 9))
print(all(isinstance(read(f'/proc/1/{name}'), int) for name in ('environ', 'mem', 'maps', \
'root/etc/passwd')))
";
    assert_eq!(hostile.text(first).trim(), "True True 0\nTrue");

    // No other user, no outer namespace, no tracing, no kernel interface that sessions do not have.
    let more = "
print([twin(117, user, user, user) for user in (0, 1, 999, 1001, 65534, 1900000000, 1900000002)])
print([twin(272, flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000)])
print(twin(101, 16, 1, 0, 0), twin(310, 1, 0, 0, 0, 0, 0), twin(165, 0, 0, 0, 0, 0), twin(321, 0, \
0, 0))
";
    let refused = "[-22, -22, -22, -22, -22, -22, -22]\n[-38, -38, -38, -38]\n-38 -38 -1 -38";
    assert_eq!(hostile.text(more).trim(), refused);

    // It kills every process that it can reach: those of its own family.
    hostile.run("for pid in range(2, 3000): twin(62, pid, 9)");
    assert_eq!(
        neighbour.text("print(x, open('secret.txt').read())").trim(),
        "alive the-secret-of-another"
    );
    let copied = neighbour.call(
        "fork_session",
        json!({"names": [format!("{}-copy", neighbour.id)]}),
    );
    assert!(!copied.is_error(), "{}", copied.text());
    assert_eq!(server.session().text("print(1)").trim(), "1");
}

fn attack_as(server: Server) {
    server.greet();
    let hostile = server.session();
    attack(&server, &hostile);
    drop(hostile);

    // A fork of a fork has no more rights, and its source gains none by it.
    let source = server.session();
    source.text("x = 1");
    assert!(
        !source
            .call("fork_session", json!({"names": ["child"]}))
            .is_error()
    );
    let fork = |session: &str, name: &str| {
        server
            .call(
                "fork_session",
                json!({"session_id": session, "names": [name]}),
            )
            .text()
            .to_owned()
    };
    fork("child", "grandchild");
    attack(
        &server,
        &Session {
            server: &server,
            id: "grandchild".to_owned(),
        },
    );
    drop(source);
    server.finish();
}

fn is_built_for_this() -> bool {
    if !cfg!(target_arch = "x86_64") {
        skipped("x86-64 (the code that drives a twin)");
    }
    cfg!(target_arch = "x86_64")
}

#[test]
fn a_session_that_has_its_twin_reaches_nothing_beyond_its_family() {
    if is_built_for_this() {
        attack_as(Server::start(&["--environment", "minimal"]));
    }
}

#[test]
fn a_session_that_has_its_twin_reaches_nothing_beyond_its_family_without_undo() {
    if is_built_for_this() {
        attack_as(Server::start(&[
            "--environment",
            "minimal",
            "--undo",
            "off",
        ]));
    }
}

#[test]
fn a_session_that_has_its_twin_reaches_nothing_beyond_its_family_as_an_ordinary_user() {
    if !is_built_for_this() {
        return;
    }
    let Some(ordinary) = Ordinary::new() else {
        return;
    };
    attack_as(Server::spawn(&mut ordinary.command("mcp"), Era::Initialize));
}
