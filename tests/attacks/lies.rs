//! Code that speaks in the runner's place. It shares the runner's process, so it can say anything on the channel; only its own session may
//! suffer.

use std::time::{Duration, Instant};

use cellblock::session::{Refused, Status};
use tokio_util::sync::CancellationToken;

use crate::support::native::{self, Session, run};

/// Finds the channel: the one socket that the session was born with.
const CHANNEL: &str = "
import json, os, socket, stat, struct
channel = next(int(name) for name in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{name}') and stat.S_ISSOCK(os.fstat(int(name)).st_mode))
def frame(**header):
    head = json.dumps(header).encode()
    return struct.pack('>II', 4 + len(head), len(head)) + head
";

/// Tells a lie in one session and shows that another one notices nothing. Returns how the liar's cell ended.
async fn lie(words: &str) -> (Session, Status) {
    lie_for(Duration::from_secs(15), words).await
}

async fn lie_for(limit: Duration, words: &str) -> (Session, Status) {
    let (liar, neighbour) = (native::shared().session(), native::shared().session());
    neighbour.ok("x = 'unharmed'").await;
    let begun = Instant::now();
    let outcome = liar.execute_with(&format!("{CHANNEL}\n{words}"), limit, CancellationToken::new()).await;
    assert!(begun.elapsed() < limit + Duration::from_secs(3), "{words}: {:?}", begun.elapsed());
    let outcome = outcome.expect("an answer");
    assert_eq!(neighbour.ok("print(x)").await, "unharmed\n");
    (liar, outcome.status)
}

/// After a lie the session works, or says that it ended; then a reset makes it work.
async fn usable_or_plainly_gone(session: &Session) {
    match session.execute("print(1)").await {
        Ok(outcome) if outcome.status == Status::Completed => assert_eq!(native::printed(&outcome), "1\n"),
        Ok(outcome) => {
            assert!(matches!(outcome.status, Status::Nonsense { .. } | Status::Died { .. }), "{:?}", outcome.status)
        }
        Err(refused) => assert!(matches!(refused, Refused::Ended { .. }), "{refused}"),
    }
    session.reset().await;
    assert_eq!(session.ok("print('again')").await, "again\n");
}

/// After frames with a forged `seq` the order of the liar's own lanes is spoiled, so its next output may be misplaced or lost. It gets an
/// answer all the same, and a reset makes the session whole.
async fn answered_and_whole_after_a_reset(session: &Session) {
    match session.execute("print(1)").await {
        Ok(outcome) => assert!(!matches!(outcome.status, Status::Raised(_)), "{:?}", outcome.status),
        Err(refused) => assert!(matches!(refused, Refused::Ended { .. }), "{refused}"),
    }
    session.reset().await;
    assert_eq!(session.ok("print('again')").await, "again\n");
}

#[test]
fn bytes_that_are_no_frame_end_the_session_and_nothing_else() {
    run(async {
        for words in [
            "os.write(channel, b'\\xff' * 64)",
            "os.write(channel, struct.pack('>II', 1 << 30, 16) + b'x' * 1024)",
            "os.write(channel, struct.pack('>II', 2, 2) + b'{}')",
            "os.write(channel, struct.pack('>II', 12, 200) + b'{}')",
            "os.write(channel, struct.pack('>II', 12, 8) + b'not json')",
            "os.write(channel, b'GET / HTTP/1.1\\r\\n\\r\\n')",
        ] {
            let (liar, status) = lie(words).await;
            assert!(matches!(status, Status::Nonsense { .. }), "{words}: {status:?}");
            usable_or_plainly_gone(&liar).await;
        }
        // Control: a cell that only looks for the channel ends well.
        assert_eq!(lie("print(channel > 2)").await.1, Status::Completed);
    });
}

#[test]
fn half_a_frame_and_a_closed_channel_get_an_answer() {
    run(async {
        let half = "os.write(channel, struct.pack('>II', 1000, 500) + b'{')";
        let (liar, status) = lie_for(Duration::from_secs(1), half).await;
        // The true end of the cell is taken for the other half, so the time limit has to speak.
        assert!(!matches!(status, Status::Raised(_)), "{status:?}");
        usable_or_plainly_gone(&liar).await;
        let (liar, status) = lie("os.close(channel)").await;
        assert!(matches!(status, Status::Nonsense { .. } | Status::Died { .. }), "{status:?}");
        usable_or_plainly_gone(&liar).await;
        let (liar, status) = lie("socket.socket(fileno=os.dup(channel)).shutdown(socket.SHUT_RDWR)").await;
        assert!(matches!(status, Status::Nonsense { .. } | Status::Died { .. }), "{status:?}");
        usable_or_plainly_gone(&liar).await;
    });
}

#[test]
fn forged_frames_change_only_the_liars_own_results() {
    run(async {
        for words in [
            // Ends for cells that nobody asked for, and for all that may come.
            "for number in range(0, 50): os.write(channel, frame(type='done', id=number, seq=number, status='ok', error=None, variables=None, files=None))",
            "os.write(channel, frame(type='hello', version=1, python='3.99', marker='0' * 32))",
            "os.write(channel, frame(type='started', id=1, seq=1, rotated=True))",
            "os.write(channel, frame(type='file_end', id=1, size=1 << 60))",
            "os.write(channel, frame(type='written', id=7, size=-1, replaced='maybe'))",
            "os.write(channel, frame(type='failed', id=1, reason='exists', message='/etc/passwd'))",
            "os.write(channel, frame(type='value', id=1, seq=2 ** 40, data={'text/plain': 'x'}, blobs=[{'mime': 'image/png', 'size': 1 << 60}]))",
            "os.write(channel, frame(type='display', id=1, seq=-1, data=[], blobs='many'))",
            "os.write(channel, frame(type='from-the-future'))",
            "os.write(channel, frame(type='done'))",
            "os.write(channel, frame(**{'type': 'done', 'id': {'nested': [1] * 1000}}))",
        ] {
            let (liar, status) = lie(words).await;
            assert!(!matches!(status, Status::Raised(_)), "{words}: {status:?}");
            answered_and_whole_after_a_reset(&liar).await;
        }
    });
}

#[test]
fn a_flood_of_frames_does_not_grow_the_server() {
    run(async {
        let before = resident();
        let (liar, status) = lie("
os.set_blocking(channel, True)
text = frame(type='display', id=1, seq=1, data={'text/plain': 'x' * 100000}, blobs=[])
for _ in range(2000): os.write(channel, text)")
        .await;
        assert!(!matches!(status, Status::Raised(_)), "{status:?}");
        let grown = resident().saturating_sub(before);
        // 200 MB were sent. Other tests run beside this one, so the bound is not tight.
        assert!(grown < 120 << 20, "{grown}");
        usable_or_plainly_gone(&liar).await;
    });
}

#[test]
fn markers_in_the_output_do_not_confuse_another_cell() {
    run(async {
        let (liar, _) = lie("
for number in range(200):
    for kind in (b'F', b'P'):
        os.write(1, b'\\0\\x1bCB' + bytes(16) + struct.pack('>I', number) + kind + b'\\n')
print('end')")
        .await;
        assert_eq!(liar.ok("print('next')").await, "next\n");
    });
}

/// Bytes of memory that this process, and so the server in it, holds.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}
