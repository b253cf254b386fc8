//! Code that writes in the runner's place. It shares the runner's process, so it can send anything
//! on the channel; only its own session may suffer.

use std::time::{Duration, Instant};

use cellblock::session::{Refused, Status};
use tokio_util::sync::CancellationToken;

use crate::support::native::{self, Session};
use crate::support::places::{Place, in_every_place};

/// Finds the channel: the last socket that the session started with. In a container there is one
/// more, on which its copies register (see `branching`).
///
/// `cell` is the number of the lying cell.
const CHANNEL: &str = "
import json, os, socket, stat, struct
from cellblock_runner import host_calls
cell = host_calls._active._execution
channel = max(int(name) for name in os.listdir('/proc/self/fd') if \
os.path.exists(f'/proc/self/fd/{name}') and stat.S_ISSOCK(os.fstat(int(name)).st_mode))
def frame(**header):
    head = json.dumps(header).encode()
    return struct.pack('>II', 4 + len(head), len(head)) + head
";

/// A session that lies, and another one that must not be affected.
struct Scene {
    liar: Session,
    neighbour: Session,
}

impl Scene {
    async fn new(place: Place) -> Scene {
        let (liar, neighbour) = (place.session(), place.session());
        neighbour.ok("x = 'unharmed'").await;
        liar.ok("x = 'begun'").await;
        Scene { liar, neighbour }
    }

    /// Sends a forged frame and returns how the cell ended.
    async fn lie(&self, words: &str) -> Status {
        self.lie_for(Duration::from_secs(15), words).await
    }

    async fn lie_for(&self, limit: Duration, words: &str) -> Status {
        let begun = Instant::now();
        let outcome = self
            .liar
            .execute_with(
                &format!("{CHANNEL}\n{words}"),
                limit,
                CancellationToken::new(),
            )
            .await;
        // Three seconds on an idle machine.
        assert!(
            begun.elapsed() < limit + Duration::from_secs(10),
            "{words}: {:?}",
            begun.elapsed()
        );
        let outcome = outcome.expect("an answer");
        assert_eq!(self.neighbour.ok("print(x)").await, "unharmed\n");
        outcome.status
    }

    /// After a forged frame the session works, or reports that it ended; then a reset makes it
    /// work.
    async fn usable_or_plainly_gone(&self) {
        match self.liar.execute("print(1)").await {
            Ok(outcome) if outcome.status == Status::Completed => {
                assert_eq!(native::printed(&outcome), "1\n")
            }
            Ok(outcome) => {
                assert!(
                    matches!(
                        outcome.status,
                        Status::ProtocolError { .. } | Status::Died { .. }
                    ),
                    "{:?}",
                    outcome.status
                )
            }
            Err(refused) => assert!(matches!(refused, Refused::Ended { .. }), "{refused}"),
        }
        self.whole_after_a_reset().await;
    }

    /// After frames with a forged `seq` the order of that session's own streams is spoiled, so its
    /// next output may be misplaced or lost. It still gets an answer, and a reset repairs the
    /// session.
    async fn answered_and_whole_after_a_reset(&self) {
        match self.liar.execute("print(1)").await {
            Ok(outcome) => assert!(
                !matches!(outcome.status, Status::Raised(_)),
                "{:?}",
                outcome.status
            ),
            Err(refused) => assert!(matches!(refused, Refused::Ended { .. }), "{refused}"),
        }
        self.whole_after_a_reset().await;
    }

    async fn whole_after_a_reset(&self) {
        self.liar.reset().await;
        assert_eq!(self.liar.ok("print('again')").await, "again\n");
    }
}

/// Bytes of memory used by this process, which includes the server.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim()
        .trim_end_matches("kB")
        .trim()
        .parse::<u64>()
        .unwrap()
        * 1024
}

in_every_place! {
    async fn bytes_that_are_no_frame_end_the_session_and_nothing_else(place) {
        let scene = Scene::new(place).await;
        for words in [
            "os.write(channel, b'\\xff' * 64)",
            "os.write(channel, struct.pack('>II', 1 << 30, 16) + b'x' * 1024)",
            "os.write(channel, struct.pack('>II', 2, 2) + b'{}')",
            "os.write(channel, struct.pack('>II', 12, 200) + b'{}')",
            "os.write(channel, struct.pack('>II', 12, 8) + b'not json')",
            "os.write(channel, b'GET / HTTP/1.1\\r\\n\\r\\n')",
            // 700 kB that would take 80 MB when decoded.
            "head = b'{\"type\":\"value\",\"id\":1,\"options\":[' + b'{\"\":0},' * 100_000 + \
             b'0]}'; \
             os.write(channel, struct.pack('>II', 4 + len(head), len(head)) + head)",
        ] {
            let status = scene.lie(words).await;
            assert!(matches!(status, Status::ProtocolError { .. }), "{words}: {status:?}");
            scene.usable_or_plainly_gone().await;
        }
        // Control: a cell that only looks for the channel completes.
        assert_eq!(scene.lie("print(channel > 2)").await, Status::Completed);
    }

    async fn half_a_frame_and_a_closed_channel_get_an_answer(place) {
        let scene = Scene::new(place).await;
        let half = "os.write(channel, struct.pack('>II', 1000, 500) + b'{')";
        let status = scene.lie_for(Duration::from_secs(1), half).await;
        // The true end of the cell is taken for the other half, so the timeout must end it.
        assert!(!matches!(status, Status::Raised(_)), "{status:?}");
        scene.usable_or_plainly_gone().await;
        let status = scene.lie("os.close(channel)").await;
        assert!(matches!(status, Status::ProtocolError { .. } | Status::Died { .. }), "{status:?}");
        scene.usable_or_plainly_gone().await;
        let shutdown = "socket.socket(fileno=os.dup(channel)).shutdown(socket.SHUT_RDWR)";
        let status = scene.lie(shutdown).await;
        assert!(matches!(status, Status::ProtocolError { .. } | Status::Died { .. }), "{status:?}");
        scene.usable_or_plainly_gone().await;
    }

    async fn forged_frames_change_only_the_liars_own_results(place) {
        let scene = Scene::new(place).await;
        for words in [
            // Ends of cells that were never requested, and of all future ones.
            "for number in range(0, cell + 50): os.write(channel, frame(type='done', id=number, \
             seq=number, status='ok', error=None, variables=None, files=None))",
            "os.write(channel, frame(type='hello', version=1, python='3.99', marker='0' * 32))",
            "os.write(channel, frame(type='started', id=cell, seq=1, rotated=True))",
            "os.write(channel, frame(type='file_end', id=cell, size=1 << 60))",
            "os.write(channel, frame(type='written', id=7, size=-1, replaced='maybe'))",
            "os.write(channel, frame(type='failed', id=cell, reason='exists', \
             message='/etc/passwd'))",
            "os.write(channel, frame(type='value', id=cell, seq=2 ** 40, data={'text/plain': 'x'}, \
             blobs=[{'mime': 'image/png', 'size': 1 << 60}]))",
            "os.write(channel, frame(type='display', id=cell, seq=-1, data=[], blobs='many'))",
            "os.write(channel, frame(type='from-the-future'))",
            "os.write(channel, frame(type='done'))",
            "os.write(channel, frame(**{'type': 'done', 'id': {'nested': [1] * 1000}}))",
        ] {
            let status = scene.lie(words).await;
            assert!(!matches!(status, Status::Raised(_)), "{words}: {status:?}");
            scene.answered_and_whole_after_a_reset().await;
        }
    }

    async fn a_flood_of_frames_does_not_grow_the_server(place) {
        let scene = Scene::new(place).await;
        let before = resident();
        let status = scene.lie("
os.set_blocking(channel, True)
text = frame(type='display', id=cell, seq=1, data={'text/plain': 'x' * 100000}, blobs=[])
for _ in range(2000): os.write(channel, text)")
        .await;
        assert!(!matches!(status, Status::Raised(_)), "{status:?}");
        let grown = resident().saturating_sub(before);
        // 200 MB were sent. Other tests run beside this one, so the bound is not tight.
        assert!(grown < 120 << 20, "{grown}");
        scene.usable_or_plainly_gone().await;
    }

    async fn markers_in_the_output_do_not_confuse_another_cell(place) {
        let scene = Scene::new(place).await;
        scene.lie("
for number in range(200):
    for kind in (b'F', b'P'):
        os.write(1, b'\\0\\x1bCB' + bytes(16) + struct.pack('>I', number) + kind + b'\\n')
print('end')")
        .await;
        assert_eq!(scene.liar.ok("print('next')").await, "next\n");
    }
}
