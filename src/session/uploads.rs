//! Uploads in parts: bytes that have arrived and wait for the rest.
//!
//! Each part names its offset, and is accepted if that is the current size of the upload. All bytes
//! that arrive are kept, also if the sender disconnects in the middle, so that it can query the
//! offset and resume. With the last part the upload becomes a file of its session, whole or not at
//! all. Uploads are limited in size and number, and abandoned ones are removed.

use std::collections::HashMap;
use std::io::{self, Seek, Write};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tempfile::SpooledTempFile;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::Instant;

use super::driver::STAGED_IN_MEMORY;
use super::{InsidePath, Principal, Refused, Retry, SessionId};

/// Limit in bytes for an upload.
pub(super) const MAX_UPLOAD_BYTES: u64 = 1024 * 1024 * 1024;
/// Unfinished uploads per principal.
const MAX_UPLOADS: usize = 8;
/// How long an upload waits for its next part.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Bytes copied in one step.
const CHUNK: usize = 256 * 1024;

/// A part of an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadPart {
    /// Offset of its first byte. Zero restarts the upload.
    pub offset: u64,
    /// Whether it is the last part, after which the file is stored.
    pub last: bool,
    pub overwrite: bool,
}

/// Progress of an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uploaded {
    pub size: u64,
    /// Whether the file is stored.
    pub finished: bool,
}

type Key = (Principal, SessionId, String);

/// The unfinished uploads of a server.
#[derive(Default)]
pub(super) struct Uploads {
    staging: Mutex<Staging>,
}

#[derive(Default)]
struct Staging {
    places: HashMap<Key, UploadState>,
    /// Whether a task that removes abandoned uploads is running.
    is_watched: bool,
}

enum UploadState {
    Here(Staged),
    /// A part is being received.
    Lent {
        size: u64,
    },
}

struct Staged {
    file: SpooledTempFile,
    size: u64,
    touched: Instant,
}

impl Uploads {
    /// Returns how many bytes of an upload have arrived.
    pub(super) fn size(&self, owner: &Principal, id: &SessionId, path: &InsidePath) -> Option<u64> {
        match self.staging().places.get(&key(owner, id, path))? {
            UploadState::Here(staged) => Some(staged.size),
            UploadState::Lent { size } => Some(*size),
        }
    }

    /// Returns the bytes of one principal's unfinished uploads.
    pub(super) fn bytes_of(&self, owner: &Principal) -> u64 {
        let staging = self.staging();
        let sizes = staging
            .places
            .iter()
            .filter(|((of, ..), _)| of == owner)
            .map(|(_, place)| match place {
                UploadState::Here(staged) => staged.size,
                UploadState::Lent { size } => *size,
            });
        sizes.sum()
    }

    /// Reads the bytes of a part, at most `room` of them. Returns the upload if the part was the
    /// last one.
    pub(super) async fn take(
        self: &Arc<Uploads>,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        part: UploadPart,
        room: u64,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<(u64, Option<SpooledTempFile>), Refused> {
        let mut lent = self.lend(key(owner, id, path), id, part.offset)?;
        let taken = lent.fill(source, room).await;
        let Some(staged) = &mut lent.staged else {
            return Err(Refused::UploadTooLarge);
        };
        staged.touched = Instant::now();
        let size = staged.size;
        match taken {
            Err(error) => {
                return Err(Refused::Transfer {
                    why: error.kind().to_string(),
                });
            }
            Ok(Filled::TooMuch) => {
                lent.staged = None;
                return Err(Refused::UploadTooLarge);
            }
            Ok(Filled::Whole) => {}
        }
        if !part.last {
            return Ok((size, None));
        }
        let mut file = lent
            .staged
            .take()
            .map(|staged| staged.file)
            .ok_or(Refused::UploadTooLarge)?;
        file.rewind().map_err(|error| Refused::Transfer {
            why: error.kind().to_string(),
        })?;
        Ok((size, Some(file)))
    }

    /// Removes the uploads to a session that is gone.
    pub(super) fn forget(&self, owner: &Principal, id: &SessionId) {
        let is_other = |(of, session, _): &Key| of != owner || session != id;
        self.staging()
            .places
            .retain(|key, place| is_other(key) || matches!(place, UploadState::Lent { .. }));
    }

    /// Takes an upload out of the table, if its size is `offset`.
    fn lend(self: &Arc<Uploads>, key: Key, id: &SessionId, offset: u64) -> Result<Lent, Refused> {
        let mut staging = self.staging();
        let places = &mut staging.places;
        let stands = match places.get(&key) {
            Some(UploadState::Lent { .. }) => {
                return Err(Refused::Occupied {
                    id: id.clone(),
                    then: Retry::SendUploadPart,
                });
            }
            Some(UploadState::Here(staged)) => staged.size,
            None => 0,
        };
        let known = places.contains_key(&key);
        let staged = match (offset, places.remove(&key)) {
            (0, _) => {
                let waiting = places.keys().filter(|(of, ..)| *of == key.0).count();
                if !known && waiting >= MAX_UPLOADS {
                    return Err(Refused::TooManyUploads { limit: MAX_UPLOADS });
                }
                Staged {
                    file: SpooledTempFile::new(STAGED_IN_MEMORY),
                    size: 0,
                    touched: Instant::now(),
                }
            }
            (offset, Some(UploadState::Here(staged))) if staged.size == offset => staged,
            (_, other) => {
                other
                    .into_iter()
                    .for_each(|place| drop(places.insert(key.clone(), place)));
                return Err(Refused::UploadOffset { expected: stands });
            }
        };
        places.insert(key.clone(), UploadState::Lent { size: staged.size });
        Ok(Lent {
            uploads: self.clone(),
            key,
            staged: Some(staged),
        })
    }

    /// Removes abandoned uploads, as long as there are any uploads.
    async fn watch(uploads: Weak<Uploads>) {
        let mut next = Instant::now() + UPLOAD_TIMEOUT;
        loop {
            tokio::time::sleep_until(next).await;
            let Some(uploads) = uploads.upgrade() else {
                return;
            };
            let mut staging = uploads.staging();
            let now = Instant::now();
            let is_forgotten = |staged: &Staged| staged.touched + UPLOAD_TIMEOUT <= now;
            staging.places.retain(
                |_, place| !matches!(place, UploadState::Here(staged) if is_forgotten(staged)),
            );
            let touched = staging.places.values().map(|place| match place {
                UploadState::Here(staged) => staged.touched,
                UploadState::Lent { .. } => now,
            });
            match touched.min() {
                Some(oldest) => next = oldest + UPLOAD_TIMEOUT,
                None => {
                    staging.is_watched = false;
                    return;
                }
            }
        }
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        self.staging
            .lock()
            .expect("nothing panics while it holds the uploads")
    }
}

/// An upload that is receiving a part. When it is dropped, it goes back to the table with the bytes
/// that have arrived.
struct Lent {
    uploads: Arc<Uploads>,
    key: Key,
    staged: Option<Staged>,
}

enum Filled {
    Whole,
    TooMuch,
}

impl Lent {
    /// Adds bytes from the source, as far as there is room.
    async fn fill(
        &mut self,
        source: &mut (dyn AsyncRead + Send + Unpin),
        room: u64,
    ) -> io::Result<Filled> {
        let Some(staged) = &mut self.staged else {
            return Ok(Filled::TooMuch);
        };
        let most = staged.size.saturating_add(room).min(MAX_UPLOAD_BYTES);
        let mut buffer = vec![0; CHUNK];
        loop {
            let size = source.read(&mut buffer).await?;
            if size == 0 {
                return Ok(Filled::Whole);
            }
            if staged.size + size as u64 > most {
                return Ok(Filled::TooMuch);
            }
            staged.file.write_all(&buffer[..size])?;
            staged.size += size as u64;
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut staging = self.uploads.staging();
        match self.staged.take() {
            Some(staged) => drop(
                staging
                    .places
                    .insert(self.key.clone(), UploadState::Here(staged)),
            ),
            None => drop(staging.places.remove(&self.key)),
        }
        // Without a runtime the server has ended, and there is nothing left to remove.
        if !staging.is_watched
            && !staging.places.is_empty()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            staging.is_watched = true;
            runtime.spawn(Uploads::watch(Arc::downgrade(&self.uploads)));
        }
    }
}

fn key(owner: &Principal, id: &SessionId, path: &InsidePath) -> Key {
    (owner.clone(), id.clone(), path.as_str().to_owned())
}
