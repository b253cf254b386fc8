//! Files of sessions over plain HTTP.

use serde_json::{Value, json};

use super::client::Raw;
use crate::support::service::Service;

const CALLERS: &[(&str, &[&str])] = &[("alice", &["python:execute"])];

async fn alice() -> (Service, Raw, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let service = Service::with_keys(folder.path(), CALLERS, &[]);
    let client = Raw::with_key(&service, "alice").await;
    (service, client, folder)
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[tokio::test]
async fn a_file_goes_in_and_comes_out_as_it_was() {
    let (_service, mut client, _folder) = alice().await;
    let content: Vec<u8> = (0..100_000_u32)
        .map(|number| (number * 7 % 251) as u8)
        .collect();
    let put = client
        .ask("PUT", "/sessions/a/files/data/t%20%C3%A4.bin", "", &content)
        .await;
    assert_eq!(put.status, 201, "{put:?}");
    let inside = json!({"code": "import hashlib; d = open('data/t ä.bin', 'rb').read(); len(d), \
                                 d[:3]", "session_id": "a"});
    let seen = client.result("execute_ipython_cell", inside).await;
    assert_eq!(
        seen["structuredContent"]["text"],
        "(100000, b'\\x00\\x07\\x0e')"
    );

    let whole = client
        .ask("GET", "/sessions/a/files/data/t%20%C3%A4.bin", "", b"")
        .await;
    assert_eq!(
        (whole.status, header(&whole.head, "content-length")),
        (200, Some("100000"))
    );
    assert_eq!(
        header(&whole.head, "content-disposition"),
        Some("attachment"),
        "it is never shown as a page"
    );
    assert_eq!(
        header(&whole.head, "x-content-type-options"),
        Some("nosniff")
    );
    let list = client.ask("GET", "/sessions/a/files", "", b"").await;
    let list: Value = serde_json::from_str(&list.body).unwrap();
    assert_eq!(
        list["files"],
        json!([{"path": "data/t ä.bin", "size": 100_000}])
    );
}

#[tokio::test]
async fn a_download_goes_on_where_it_broke_off() {
    let (_service, mut client, _folder) = alice().await;
    client
        .ask("PUT", "/sessions/a/files/f", "", b"0123456789")
        .await;
    let known = client.ask("HEAD", "/sessions/a/files/f", "", b"").await;
    assert_eq!(
        (known.status, header(&known.head, "content-length")),
        (200, Some("10"))
    );
    let tag = header(&known.head, "etag").unwrap().to_owned();

    let rest = client
        .ask(
            "GET",
            "/sessions/a/files/f",
            &format!("range: bytes=4-\r\nif-range: {tag}\r\n"),
            b"",
        )
        .await;
    assert_eq!((rest.status, rest.body.as_str()), (206, "456789"));
    assert_eq!(header(&rest.head, "content-range"), Some("bytes 4-9/10"));
    assert_eq!(
        client
            .ask("GET", "/sessions/a/files/f", "range: bytes=-3\r\n", b"")
            .await
            .body,
        "789"
    );
    assert_eq!(
        client
            .ask("GET", "/sessions/a/files/f", "range: bytes=10-\r\n", b"")
            .await
            .status,
        416
    );
    assert_eq!(
        client
            .ask(
                "GET",
                "/sessions/a/files/f",
                &format!("if-none-match: {tag}\r\n"),
                b""
            )
            .await
            .status,
        304
    );

    client
        .ask("PUT", "/sessions/a/files/f", "", b"another")
        .await;
    let changed = client
        .ask(
            "GET",
            "/sessions/a/files/f",
            &format!("range: bytes=4-\r\nif-range: {tag}\r\n"),
            b"",
        )
        .await;
    assert_eq!(
        (changed.status, changed.body.as_str()),
        (200, "another"),
        "the rest would be of another file"
    );
}

#[tokio::test]
async fn an_upload_goes_on_where_it_broke_off() {
    let (service, mut client, _folder) = alice().await;
    let first = client
        .ask(
            "PUT",
            "/sessions/a/files/f",
            "content-range: bytes 0-3/10\r\n",
            b"0123",
        )
        .await;
    assert_eq!(
        (first.status, header(&first.head, "upload-offset")),
        (202, Some("4"))
    );
    assert_eq!(
        client
            .ask("GET", "/sessions/a/files/f", "", b"")
            .await
            .status,
        404,
        "half a file is none"
    );
    let known = client.ask("HEAD", "/sessions/a/files/f", "", b"").await;
    assert_eq!(
        (known.status, header(&known.head, "upload-offset")),
        (204, Some("4"))
    );
    let wrong = client
        .ask(
            "PUT",
            "/sessions/a/files/f",
            "content-range: bytes 6-9/10\r\n",
            b"6789",
        )
        .await;
    assert_eq!(
        (wrong.status, header(&wrong.head, "upload-offset")),
        (409, Some("4"))
    );
    // What was not read of a refused body ends its connection.
    let mut client = Raw::with_key(&service, "alice").await;
    let last = client
        .ask(
            "PUT",
            "/sessions/a/files/f",
            "content-range: bytes 4-9/10\r\n",
            b"456789",
        )
        .await;
    assert_eq!(last.status, 201, "{last:?}");
    assert_eq!(
        client.ask("GET", "/sessions/a/files/f", "", b"").await.body,
        "0123456789"
    );
}

#[tokio::test]
async fn what_cannot_be_a_file_below_the_working_folder_is_refused() {
    let (_service, mut client, _folder) = alice().await;
    client.ask("PUT", "/sessions/a/files/f", "", b"there").await;
    client
        .result(
            "execute_ipython_cell",
            json!({"code": "import os; os.symlink('/etc/passwd', 'link')", "session_id": "a"}),
        )
        .await;
    for (path, status) in [
        ("/sessions/a/files/missing", 404),
        ("/sessions/nobody/files/f", 404),
        ("/sessions/a/files/%2e%2e/f", 400),
        ("/sessions/a/files/a/%2E%2E/%2e%2e/f", 400),
        ("/sessions/a/files//etc/passwd", 400),
        ("/sessions/a/files/%2Fetc/passwd", 400),
        ("/sessions/a/files/%00", 400),
        ("/sessions/a/files/%ff", 400),
        ("/sessions/a/files/link", 409),
        ("/sessions/..%2f/files/f", 400),
    ] {
        let answer = client.ask("GET", path, "", b"").await;
        assert_eq!(answer.status, status, "{path}: {answer:?}");
        assert!(!answer.body.contains("root:"), "{path}");
    }
    let kept = client
        .ask("PUT", "/sessions/a/files/f", "if-none-match: *\r\n", b"new")
        .await;
    assert_eq!(kept.status, 412, "{kept:?}");
    assert_eq!(
        client.ask("GET", "/sessions/a/files/f", "", b"").await.body,
        "there",
        "the control"
    );
    for method in ["POST", "DELETE", "PATCH"] {
        assert_eq!(
            client
                .ask(method, "/sessions/a/files/f", "", b"")
                .await
                .status,
            405,
            "{method}"
        );
    }
}

#[tokio::test]
async fn files_of_sessions_are_resources() {
    let (_service, mut client, _folder) = alice().await;
    client
        .ask("PUT", "/sessions/a/files/data/t%20%C3%A4.csv", "", b"1,2\n")
        .await;
    client
        .ask("PUT", "/sessions/a/files/b.bin", "", &[0xff, 0])
        .await;
    let listed = client.rpc("resources/list", json!({})).await;
    let uris: Vec<&str> = listed["resources"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|one| one["uri"].as_str())
        .collect();
    assert_eq!(
        uris,
        [
            "cellblock://sessions/a/files/b.bin",
            "cellblock://sessions/a/files/data/t%20%C3%A4.csv"
        ]
    );
    let text = client.rpc("resources/read", json!({"uri": uris[1]})).await;
    assert_eq!(text["contents"][0]["text"], "1,2\n");
    let bytes = client.rpc("resources/read", json!({"uri": uris[0]})).await;
    assert_eq!(bytes["contents"][0]["blob"], "/wA=");
}
