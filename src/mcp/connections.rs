//! Connections of older clients: whose each is, and what it takes to go on with it after a restart.
//!
//! An older client opens a connection with `initialize` and names it in every later request. Most
//! clients cannot open it anew by themselves, so what they said is kept in a folder of the
//! operator's own, one small file each, and the next server goes on as if nothing had happened.
//! Without a folder connections end with the server.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rmcp::transport::streamable_http_server::session::{
    SessionState, SessionStore, SessionStoreError,
};
use serde::{Deserialize, Serialize};

/// Connections that may be open at once, in all and for one caller. Each holds a task and some
/// buffers.
const MOST: usize = 4096;
const MAX_OF_ONE: usize = 1024;
/// The largest file that is read back. What a client says of itself is shorter.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// All connections.
pub(super) struct Connections {
    folder: Option<PathBuf>,
    known: Mutex<HashMap<String, Connection>>,
}

/// One connection, as it is written down.
#[derive(Clone, Serialize, Deserialize)]
struct Connection {
    id: String,
    /// Nobody until the answer to its `initialize` is on its way.
    principal: Option<String>,
    state: SessionState,
}

impl Connections {
    /// Reads back what an earlier server left in the folder, unless it is older than `idle`.
    pub(super) fn new(folder: Option<PathBuf>, idle: Duration) -> Connections {
        let mut known = HashMap::new();
        if let Some(folder) = &folder
            && let Err(error) = read_back(folder, idle, &mut known)
        {
            tracing::warn!(%error, "connections of an earlier server are not known");
        }
        Connections {
            folder,
            known: Mutex::new(known),
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Connection>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether a connection is this caller's.
    pub(super) fn belongs_to(&self, id: &[u8], principal: &str) -> bool {
        let known = self.known();
        let connection = std::str::from_utf8(id).ok().and_then(|id| known.get(id));
        connection.is_some_and(|connection| connection.principal.as_deref() == Some(principal))
    }

    /// Says whose a connection is that was just opened.
    pub(super) fn give(&self, id: &str, principal: &str) {
        let connection = {
            let mut known = self.known();
            let Some(connection) = known.get_mut(id) else {
                return;
            };
            connection.principal = Some(principal.to_owned());
            connection.clone()
        };
        if let Some(folder) = &self.folder
            && let Err(error) = write_down(folder, &connection)
        {
            tracing::warn!(%error, "a connection will not outlive this server");
        }
    }

    /// Tells whether the caller may open another one.
    pub(super) fn has_room(&self, principal: &str) -> bool {
        let known = self.known();
        let own = known
            .values()
            .filter(|connection| connection.principal.as_deref() == Some(principal))
            .count();
        known.len() < MOST && own < MAX_OF_ONE
    }

    /// Forgets those that `is_alive` does not know.
    pub(super) fn forget_all_but(&self, is_alive: impl Fn(&str) -> bool) {
        let gone: Vec<String> = self
            .known()
            .keys()
            .filter(|id| !is_alive(id))
            .cloned()
            .collect();
        gone.iter().for_each(|id| self.forget(id));
    }

    pub(super) fn forget(&self, id: &str) {
        if self.known().remove(id).is_some()
            && let Some(folder) = &self.folder
        {
            // It may not have been written down.
            let _ = fs::remove_file(file(folder, id));
        }
    }
}

#[async_trait]
impl SessionStore for Connections {
    async fn load(&self, id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        Ok(self
            .known()
            .get(id)
            .map(|connection| connection.state.clone()))
    }

    async fn store(&self, id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        let connection = Connection {
            id: id.to_owned(),
            principal: None,
            state: state.clone(),
        };
        // One that goes on keeps its owner.
        self.known().entry(id.to_owned()).or_insert(connection);
        Ok(())
    }

    async fn delete(&self, id: &str) -> Result<(), SessionStoreError> {
        self.forget(id);
        Ok(())
    }
}

/// The name of a connection's file. The id is the library's and has only hexadecimal digits and
/// dashes; whatever else it held would not become a path.
fn file(folder: &Path, id: &str) -> PathBuf {
    let plain: String = id
        .chars()
        .filter(|letter| letter.is_ascii_alphanumeric() || *letter == '-')
        .take(64)
        .collect();
    folder.join(plain + ".json")
}

fn write_down(folder: &Path, connection: &Connection) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(file(folder, &connection.id))?;
    file.write_all(&serde_json::to_vec(connection)?)
}

fn read_back(
    folder: &Path,
    idle: Duration,
    known: &mut HashMap<String, Connection>,
) -> std::io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries.flatten() {
        let connection = entry.metadata().ok().filter(|data| {
            let age = data
                .modified()
                .ok()
                .and_then(|time| time.elapsed().ok())
                .unwrap_or_default();
            data.is_file() && data.len() <= MAX_FILE_BYTES && age <= idle
        });
        let connection = connection
            .and_then(|_| serde_json::from_slice::<Connection>(&fs::read(entry.path()).ok()?).ok());
        match connection {
            Some(connection) if connection.principal.is_some() && known.len() < MOST => {
                known.insert(connection.id.clone(), connection);
            }
            // Too old, or half written when the server died.
            _ => drop(fs::remove_file(entry.path())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rmcp::model::InitializeRequestParams;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn state() -> SessionState {
        SessionState::new(InitializeRequestParams::default())
    }

    async fn opened(connections: &Connections, id: &str, principal: &str) {
        connections.store(id, &state()).await.unwrap();
        connections.give(id, principal);
    }

    #[tokio::test]
    async fn a_connection_belongs_to_whoever_opened_it() {
        let connections = Connections::new(None, HOUR);
        connections.store("1", &state()).await.unwrap();
        assert!(!connections.belongs_to(b"1", "alice"), "it is nobody's yet");
        connections.give("1", "alice");
        assert!(connections.belongs_to(b"1", "alice"));
        assert!(!connections.belongs_to(b"1", "bob") && !connections.belongs_to(b"2", "alice"));
        connections.store("1", &state()).await.unwrap();
        assert!(
            connections.belongs_to(b"1", "alice"),
            "going on with it changes nothing"
        );
        connections.delete("1").await.unwrap();
        assert!(!connections.belongs_to(b"1", "alice"));
    }

    #[tokio::test]
    async fn the_next_server_goes_on_with_connections() {
        let folder = tempfile::tempdir().unwrap();
        let place = || Some(folder.path().join("connections"));
        let first = Connections::new(place(), HOUR);
        opened(&first, "a-1", "alice").await;
        opened(&first, "a-2", "alice").await;
        first.delete("a-2").await.unwrap();
        fs::write(folder.path().join("connections/broken.json"), "{").unwrap();
        let second = Connections::new(place(), HOUR);
        assert!(second.belongs_to(b"a-1", "alice") && !second.belongs_to(b"a-1", "bob"));
        assert!(
            second.load("a-1").await.unwrap().is_some()
                && second.load("a-2").await.unwrap().is_none()
        );
        assert_eq!(
            fs::read_dir(place().unwrap()).unwrap().count(),
            1,
            "what is no use is removed"
        );
        let third = Connections::new(place(), Duration::ZERO);
        assert!(
            third.load("a-1").await.unwrap().is_none(),
            "it was not used for too long"
        );
    }

    #[tokio::test]
    async fn one_caller_cannot_take_all_places() {
        let connections = Connections::new(None, HOUR);
        for number in 0..MAX_OF_ONE {
            assert!(connections.has_room("alice"));
            opened(&connections, &number.to_string(), "alice").await;
        }
        assert!(!connections.has_room("alice") && connections.has_room("bob"));
        connections.forget_all_but(|id| id != "0");
        assert!(connections.has_room("alice"));
    }

    #[test]
    fn no_name_leads_out_of_the_folder() {
        for id in ["../../etc/passwd", "/etc/passwd", "a/b", "..", ""] {
            assert_eq!(
                file(Path::new("/f"), id).parent(),
                Some(Path::new("/f")),
                "{id}"
            );
        }
    }
}
