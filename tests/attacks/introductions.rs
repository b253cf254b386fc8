//! Sessions in containers that lie to the supervisor, which is the first process of their container
//! and must outlive them.
//!
//! A copy of a session registers with the supervisor on a socket that the session holds, and text
//! comes through pipes that the session hands over. Both can be arbitrary. Natively no process in a
//! sandbox is asked for anything of the kind.

use std::time::Duration;

use cellblock::session::{Refused, Status};
use tokio_util::sync::CancellationToken;

use crate::support::native::Session;
use crate::support::places::{Place, cases};

/// Finds the socket on which copies register, and the channel, which is the next one.
const SOCKETS: &str = "
import os, socket, stat, threading
sockets = sorted(int(name) for name in os.listdir('/proc/self/fd') if \
os.path.exists(f'/proc/self/fd/{name}') and stat.S_ISSOCK(os.fstat(int(name)).st_mode))
introductions, channel = sockets
def introduce(descriptor):
    socket.send_fds(socket.socket(fileno=os.dup(introductions)), [b'{}'], [descriptor])
def keep_introducing(descriptor):
    # Also at the moment at which somebody is expected.
    def again_and_again():
        while True: introduce(descriptor)
    threading.Thread(target=again_and_again, daemon=True).start()
";

/// A session with something to lose, before and after its attack.
struct Scene {
    hostile: Session,
}

impl Scene {
    async fn new(place: Place) -> Scene {
        let hostile = place.session();
        hostile
            .ok("x = 'carried'; open('file', 'w').write('kept')")
            .await;
        Scene { hostile }
    }

    /// Starts again in the same container.
    async fn again(&self) {
        assert!(
            self.hostile.reset().await.files_kept,
            "the supervisor has ended"
        );
        assert_eq!(
            self.hostile
                .ok("x = 'carried'; print(open('file').read())")
                .await,
            "kept\n"
        );
    }

    /// Checks that there is one session, which answers each cell once and immediately.
    async fn is_there_once(&self, attack: &str) {
        for number in 0..4 {
            let cell = format!("print({number}, x)");
            let limit = Duration::from_secs(20);
            let outcome = self
                .hostile
                .execute_with(&cell, limit, CancellationToken::new())
                .await
                .unwrap();
            assert_eq!(outcome.status, Status::Completed, "{attack}");
            assert_eq!(
                crate::support::native::printed(&outcome),
                format!("{number} carried\n"),
                "{attack}"
            );
        }
    }
}

cases! {
    Place,
    [in_docker: super::Place::docker(), in_podman: super::Place::podman()],
    {
    async fn a_session_whose_copies_cannot_introduce_themselves_is_there_once(place) {
        let scene = Scene::new(place).await;
        for attack in [
            "socket.socket(fileno=os.dup(introductions)).shutdown(socket.SHUT_RDWR)",
            "os.close(introductions)",
            "os.dup2(os.open('file', os.O_RDWR), introductions)",
            "os.dup2(os.open('/dev/null', os.O_RDWR), introductions)",
            "ends = socket.socketpair(); os.dup2(ends[0].fileno(), introductions); ends[1].close()",
        ] {
            scene.hostile.ok(&format!("{SOCKETS}{attack}")).await;
            scene.is_there_once(attack).await;
            let refused = scene.hostile.try_forks(1).await.map(|_| ()).unwrap_err();
            assert!(matches!(refused, Refused::CannotCopy { .. }), "{attack}: {refused:?}");
            scene.is_there_once(attack).await;
            scene.again().await;
        }
        // Control: without an attack it can be copied.
        assert_eq!(scene.hostile.fork().await.ok("print(x)").await, "carried\n");
    }

    async fn whoever_introduces_anything_but_a_copy_is_not_heard(place) {
        let scene = Scene::new(place).await;
        for attack in [
            "keep_introducing(os.open('file', os.O_RDWR))",
            "keep_introducing(socket.socketpair()[0].detach())",
            "keep_introducing(socket.socket(socket.AF_INET).detach())",
            // The session itself, in the place of its own copy.
            "keep_introducing(socket.socketpair(socket.AF_UNIX, \
             socket.SOCK_SEQPACKET)[0].detach())",
        ] {
            scene.hostile.ok(&format!("{SOCKETS}{attack}")).await;
            let fork = scene.hostile.fork().await;
            assert_eq!(fork.ok("print(x)").await, "carried\n", "{attack}");
            fork.close().await;
            scene.is_there_once(attack).await;
            scene.again().await;
        }
    }

    async fn a_child_that_plays_a_copy_gains_nothing(place) {
        let scene = Scene::new(place).await;
        // It is accepted as the expected copy, and sends arbitrary data when it is asked for a
        // session.
        let attack = "
mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    while True:
        try:
            introduce(theirs.fileno())
            socket.recv_fds(mine, 4096, 8)
            mine.send(b'{\"interpreter\": \"everybody\"}')
            mine.send(b'[[[')
        except OSError:
            os._exit(0)";
        scene.hostile.ok(&format!("{SOCKETS}{attack}")).await;
        match scene.hostile.try_forks(1).await {
            Ok((forks, _)) => forks[0].close().await,
            Err(refused) => assert!(
                matches!(refused, Refused::CannotCopy { .. } | Refused::Launch(_)),
                "{refused:?}"
            ),
        }
        let _ = scene.hostile.try_undo(1).await;
        scene.again().await;
    }

    async fn pipes_that_are_none_end_no_more_than_the_session(place) {
        let scene = Scene::new(place).await;
        for pipes in [
            "[os.open('file', os.O_RDWR)] * 2",
            "[os.open('/dev/null', os.O_RDWR), os.open('/work', os.O_RDONLY)]",
            "os.pipe()[::-1][:1] * 2",
            "[os.open('/dev/null', os.O_RDWR)] * 8",
            // Two valid ones that block their reader, whatever mode it uses.
            "waiting()",
        ] {
            let attack = format!(
                "{SOCKETS}
import json, struct
def waiting():
    ends = [os.pipe() for _ in range(2)]
    def keep_waiting():
        while True:
            for end, _ in ends: os.set_blocking(end, True)
    threading.Thread(target=keep_waiting, daemon=True).start()
    return [end for end, _ in ends]
head = json.dumps(dict(type='from-the-future')).encode()
socket.send_fds(socket.socket(fileno=os.dup(channel)), [struct.pack('>II', 4 + len(head), \
len(head)) + head], {pipes})"
            );
            let outcome = scene.hostile.execute(&attack).await.unwrap();
            assert!(!matches!(outcome.status, Status::Raised(_)), "{pipes}: {:?}", outcome.status);
            scene.again().await;
        }
    }
    }
}
