//! Tests of listing files and of reading and uploading them in parts, with the fake backend and a
//! paused clock.

use std::io;
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio_util::sync::CancellationToken;

use super::lifecycle::{Setting, id, owner, setting, setting_with};
use crate::sandbox::fake::FakeBackend;
use crate::session::*;

fn path(name: &str) -> InsidePath {
    InsidePath::from_str(name).unwrap()
}

fn part(offset: u64, last: bool) -> UploadPart {
    UploadPart {
        offset,
        last,
        overwrite: false,
    }
}

/// Yields some bytes and then fails.
struct BreaksOff<'a>(&'a [u8]);

impl AsyncRead for BreaksOff<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.0.is_empty() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        into.put_slice(std::mem::take(&mut self.0));
        Poll::Ready(Ok(()))
    }
}

impl Setting {
    async fn range(
        &self,
        name: &str,
        offset: u64,
        length: Option<u64>,
    ) -> Result<(Vec<u8>, FileRange), Refused> {
        let mut bytes = Vec::new();
        let (owner, id) = (owner(), id("a"));
        let range = self
            .sessions
            .read_file_range(&owner, &id, &path(name), offset, length, &mut bytes)
            .await?;
        Ok((bytes, range))
    }

    async fn send(
        &self,
        name: &str,
        part: UploadPart,
        mut bytes: &[u8],
    ) -> Result<Uploaded, Refused> {
        self.sessions
            .upload(&owner(), &id("a"), &path(name), part, &mut bytes)
            .await
    }

    fn arrived(&self, name: &str) -> Option<u64> {
        self.sessions.uploaded(&owner(), &id("a"), &path(name))
    }
}

#[tokio::test(start_paused = true)]
async fn files_are_listed_in_order_while_no_cell_runs() {
    let setting = setting();
    let listed = async || setting.sessions.list_files(&owner(), &id("a")).await;
    assert!(matches!(listed().await, Err(Refused::Unknown { .. })));
    for name in ["b/two", "one", "a.txt"] {
        setting
            .upload("a", name, name.as_bytes(), false)
            .await
            .unwrap();
    }
    let note = |path: &str| FileNote {
        path: path.to_owned(),
        size: path.len() as u64,
    };
    let expected = FileList {
        files: vec![note("a.txt"), note("b/two"), note("one")],
        omitted: 0,
    };
    assert_eq!(listed().await.unwrap(), expected);
    let running = setting
        .begin("a", "sleep 5", CancellationToken::new())
        .await;
    assert!(matches!(listed().await, Err(Refused::CellRunning { .. })));
    running.await.unwrap().unwrap();
    assert_eq!(listed().await.unwrap(), expected);
    let other = Principal("somebody else".to_owned());
    assert!(matches!(
        setting.sessions.list_files(&other, &id("a")).await,
        Err(Refused::Unknown { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn a_long_list_is_cut_and_says_so_and_names_that_nobody_can_ask_for_are_left_out() {
    let setting = setting();
    let names = (0..1005)
        .map(|number| format!("keep f{number:04} x\n"))
        .collect::<String>();
    setting.ok("a", &names).await;
    let list = setting
        .sessions
        .list_files(&owner(), &id("a"))
        .await
        .unwrap();
    assert_eq!(
        (
            list.files.len(),
            list.omitted,
            list.files[999].path.as_str()
        ),
        (1000, 5, "f0999")
    );
    setting.ok("b", "keep bad\u{7}name x\nkeep good x").await;
    let list = setting
        .sessions
        .list_files(&owner(), &id("b"))
        .await
        .unwrap();
    assert_eq!(
        list,
        FileList {
            files: vec![FileNote {
                path: "good".to_owned(),
                size: 1
            }],
            omitted: 1
        }
    );
}

#[tokio::test(start_paused = true)]
async fn a_file_is_read_in_parts_and_says_when_it_has_changed() {
    let setting = setting();
    setting
        .upload("a", "data", b"0123456789", false)
        .await
        .unwrap();
    let (bytes, whole) = setting.range("data", 0, None).await.unwrap();
    assert_eq!(
        (bytes.as_slice(), whole.total, whole.sent),
        (&b"0123456789"[..], 10, 10)
    );
    let (bytes, middle) = setting.range("data", 4, Some(3)).await.unwrap();
    assert_eq!(
        (bytes.as_slice(), middle.sent, &middle.version),
        (&b"456"[..], 3, &whole.version)
    );
    for (offset, length, sent) in [
        (8, Some(100), 2),
        (10, None, 0),
        (u64::MAX, Some(1), 0),
        (3, Some(0), 0),
    ] {
        assert_eq!(
            setting.range("data", offset, length).await.unwrap().1.sent,
            sent,
            "{offset}"
        );
    }
    setting
        .upload("a", "data", b"012345678X", true)
        .await
        .unwrap();
    assert_ne!(
        setting.range("data", 0, None).await.unwrap().1.version,
        whole.version
    );
    assert!(matches!(
        setting.range("none", 0, None).await,
        Err(Refused::File { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn an_upload_in_parts_goes_on_where_it_broke_off() {
    let setting = setting();
    assert_eq!(
        setting.send("data", part(0, false), b"0123").await.unwrap(),
        Uploaded {
            size: 4,
            finished: false
        }
    );
    let mut broken = BreaksOff(b"45");
    let (owner, session) = (owner(), id("a"));
    let refused = setting
        .sessions
        .upload(&owner, &session, &path("data"), part(4, true), &mut broken)
        .await;
    assert!(matches!(refused, Err(Refused::Transfer { .. })));
    assert_eq!(setting.arrived("data"), Some(6));
    assert!(matches!(
        setting.send("data", part(4, true), b"x").await,
        Err(Refused::UploadOffset { expected: 6 })
    ));
    assert!(
        setting.sessions.list(&owner).is_empty(),
        "no session is made for half a file"
    );
    assert_eq!(
        setting.send("data", part(6, true), b"789").await.unwrap(),
        Uploaded {
            size: 9,
            finished: true
        }
    );
    assert_eq!(
        setting.download("a", "data", 100).await.unwrap(),
        b"012345789"
    );
    assert_eq!(setting.arrived("data"), None);
}

#[tokio::test(start_paused = true)]
async fn what_arrived_is_kept_when_the_caller_goes_away_in_the_middle() {
    let setting = setting();
    let (mut pipe, mut source) = tokio::io::duplex(64);
    tokio::io::AsyncWriteExt::write_all(&mut pipe, b"0123")
        .await
        .unwrap();
    let (owner, session, name) = (owner(), id("a"), path("data"));
    let call = setting
        .sessions
        .upload(&owner, &session, &name, part(0, true), &mut source);
    assert!(
        tokio::time::timeout(Duration::from_secs(1), call)
            .await
            .is_err()
    );
    assert_eq!(setting.arrived("data"), Some(4));
    // While a part is being received, another part of the same upload is refused.
    let (_pipe, mut slow) = tokio::io::duplex(64);
    let first = setting
        .sessions
        .upload(&owner, &session, &name, part(4, false), &mut slow);
    tokio::pin!(first);
    assert!(super::lifecycle::futures_are_pending(&mut first).await);
    assert!(matches!(
        setting.send("data", part(4, true), b"x").await,
        Err(Refused::Occupied { .. })
    ));
}

#[tokio::test(start_paused = true)]
async fn uploads_belong_to_their_owner_are_few_and_are_forgotten() {
    let setting = setting();
    setting.send("data", part(0, false), b"0123").await.unwrap();
    let other = Principal("somebody else".to_owned());
    assert_eq!(
        setting.sessions.uploaded(&other, &id("a"), &path("data")),
        None
    );
    let foreign = setting
        .sessions
        .upload(
            &other,
            &id("a"),
            &path("data"),
            part(4, true),
            &mut &b"x"[..],
        )
        .await;
    assert!(matches!(
        foreign,
        Err(Refused::UploadOffset { expected: 0 })
    ));
    for number in 1..8 {
        setting
            .send(&format!("data{number}"), part(0, false), b"x")
            .await
            .unwrap();
    }
    assert!(matches!(
        setting.send("more", part(0, false), b"x").await,
        Err(Refused::TooManyUploads { .. })
    ));
    // Restarting one of them needs no more room.
    assert_eq!(
        setting
            .send("data1", part(0, false), b"yy")
            .await
            .unwrap()
            .size,
        2
    );
    tokio::time::sleep(Duration::from_secs(3000)).await;
    setting.send("data", part(4, false), b"4").await.unwrap();
    tokio::time::sleep(Duration::from_secs(3000)).await;
    assert_eq!(
        (setting.arrived("data"), setting.arrived("data1")),
        (Some(5), None)
    );
    tokio::time::sleep(Duration::from_secs(3700)).await;
    assert_eq!(setting.arrived("data"), None);
}

#[tokio::test(start_paused = true)]
async fn an_upload_is_not_larger_than_may_be_stored() {
    const MIB: u64 = 1024 * 1024;
    let quotas = Quotas {
        stored: Some(MIB),
        ..Quotas::default()
    };
    let setting = setting_with(
        FakeBackend::new(),
        SessionSettings {
            quotas,
            ..SessionSettings::default()
        },
    );
    let mut endless = tokio::io::repeat(b'x').take(2 * MIB);
    let name = path("data");
    let refused = setting
        .sessions
        .upload(&owner(), &id("a"), &name, part(0, true), &mut endless)
        .await;
    assert!(
        matches!(
            refused,
            Err(Refused::Quota {
                which: Quota::Stored,
                ..
            })
        ),
        "{refused:?}"
    );
    setting
        .send("data", part(0, false), &vec![b'x'; MIB as usize / 2])
        .await
        .unwrap();
    assert_eq!(setting.sessions.usage(&owner()).stored, MIB / 2);
    let free = super::lifecycle::setting();
    let mut endless = tokio::io::repeat(b'x').take(2 * MIB);
    let sent = free
        .sessions
        .upload(&owner(), &id("a"), &name, part(0, true), &mut endless)
        .await
        .unwrap();
    assert_eq!(
        sent,
        Uploaded {
            size: 2 * MIB,
            finished: true
        }
    );
}
