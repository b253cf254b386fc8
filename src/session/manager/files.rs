//! Files of sessions: copied in and out through staged data, whole or in parts.
//!
//! Contents are staged between the caller and the driver, so that a slow or failing caller neither
//! blocks a session nor leaves a partial file.

use tempfile::SpooledTempFile;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::oneshot;

use super::Sessions;
use crate::session::driver::{FileData, ReadExtent, STAGED_IN_MEMORY, SessionJob};
use crate::session::uploads::{UploadPart, Uploaded};
use crate::session::{FileList, FileRange, InsidePath, Principal, Refused, SessionId};

/// The largest part of a file that one call returns. Callers request the rest in further calls.
const MAX_PART_BYTES: u64 = 1024 * 1024 * 1024;
/// Bytes of a file copied in one step.
const CHUNK: usize = 256 * 1024;

impl Sessions {
    /// Stores a file, and creates the session if its id is new. The file appears whole or not at
    /// all.
    ///
    /// The source is read to its end first, so that a slow or failing source neither blocks the
    /// session nor leaves a partial file.
    pub async fn write_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: &mut (dyn AsyncRead + Send + Unpin),
        overwrite: bool,
    ) -> Result<u64, Refused> {
        let (source, size) = stage(source).await.map_err(|error| Refused::Transfer {
            why: error.kind().to_string(),
        })?;
        self.check_stored(owner, size)?;
        self.write_staged(owner, id, path, source, overwrite).await
    }

    async fn write_staged(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        source: SpooledTempFile,
        overwrite: bool,
    ) -> Result<u64, Refused> {
        let entry = self.find_or_create(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(
            &entry,
            SessionJob::Write {
                path: path.clone(),
                overwrite,
                source,
                reply,
            },
        )
        .map_err(|error| self.explained(owner, id, error))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Copies a file of at most `limit` bytes to `sink`. Nothing is written to the sink unless the
    /// whole file was read.
    pub async fn read_file(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        limit: u64,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<u64, Refused> {
        let received = self
            .read(owner, id, path, ReadExtent::Whole { limit })
            .await?;
        unstage(received.bytes, sink)
            .await
            .map_err(|error| Refused::Transfer {
                why: error.kind().to_string(),
            })
    }

    /// Copies a part of a file to `sink`: from `offset` to the end or at most `length` bytes, and
    /// at most 1 GiB per call. An offset beyond the end yields no bytes, which is not an error.
    pub async fn read_file_range(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        offset: u64,
        length: Option<u64>,
        sink: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<FileRange, Refused> {
        let length = length.unwrap_or(MAX_PART_BYTES).min(MAX_PART_BYTES);
        // The runner uses signed numbers.
        let offset = offset.min(i64::MAX as u64);
        let FileData {
            bytes,
            sent,
            total,
            version,
        } = self
            .read(owner, id, path, ReadExtent::Part { offset, length })
            .await?;
        unstage(bytes, sink)
            .await
            .map_err(|error| Refused::Transfer {
                why: error.kind().to_string(),
            })?;
        Ok(FileRange {
            total,
            sent,
            version,
        })
    }

    async fn read(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        what: ReadExtent,
    ) -> Result<FileData, Refused> {
        let entry = self.find(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(
            &entry,
            SessionJob::Read {
                path: path.clone(),
                what,
                reply,
            },
        )
        .map_err(|error| self.explained(owner, id, error))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Lists the files of a session, while no cell runs in it.
    pub async fn list_files(&self, owner: &Principal, id: &SessionId) -> Result<FileList, Refused> {
        let entry = self.find(owner, id)?;
        let (reply, answer) = oneshot::channel();
        self.submit(&entry, SessionJob::List { reply })
            .map_err(|error| self.explained(owner, id, error))?;
        answer.await.unwrap_or_else(|_| Err(self.gone(owner, id)))
    }

    /// Accepts one part of a file that is uploaded in several. The last part stores the file as
    /// `write_file` does.
    ///
    /// If the source of a part fails or the future is dropped, the bytes that arrived are kept;
    /// `uploaded` returns their number.
    pub async fn upload(
        &self,
        owner: &Principal,
        id: &SessionId,
        path: &InsidePath,
        part: UploadPart,
        source: &mut (dyn AsyncRead + Send + Unpin),
    ) -> Result<Uploaded, Refused> {
        self.check_stored(owner, 1)?;
        let room = self.room_to_store(owner);
        let taken = self
            .inner
            .uploads
            .take(owner, id, path, part, room, source)
            .await;
        if let Err(Refused::UploadTooLarge) = taken {
            // Name the quota if it was the limiting factor.
            self.check_stored(owner, part.offset.saturating_add(room).saturating_add(1))?;
        }
        let (size, file) = taken?;
        let Some(source) = file else {
            return Ok(Uploaded {
                size,
                finished: false,
            });
        };
        let size = self
            .write_staged(owner, id, path, source, part.overwrite)
            .await?;
        Ok(Uploaded {
            size,
            finished: true,
        })
    }

    /// Returns how many bytes of an unfinished upload have arrived.
    pub fn uploaded(&self, owner: &Principal, id: &SessionId, path: &InsidePath) -> Option<u64> {
        self.inner.uploads.size(owner, id, path)
    }
}

/// Reads a source to its end. Returns the staged data and its size in bytes.
pub(in crate::session) async fn stage(
    source: &mut (dyn AsyncRead + Send + Unpin),
) -> std::io::Result<(SpooledTempFile, u64)> {
    use std::io::{Seek, Write};
    let mut staged = SpooledTempFile::new(STAGED_IN_MEMORY);
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        let size = source.read(&mut buffer).await?;
        if size == 0 {
            staged.rewind()?;
            return Ok((staged, total));
        }
        staged.write_all(&buffer[..size])?;
        total += size as u64;
    }
}

async fn unstage(
    mut staged: SpooledTempFile,
    sink: &mut (dyn AsyncWrite + Send + Unpin),
) -> std::io::Result<u64> {
    use std::io::Read;
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        let size = staged.read(&mut buffer)?;
        if size == 0 {
            sink.flush().await?;
            return Ok(total);
        }
        sink.write_all(&buffer[..size]).await?;
        total += size as u64;
    }
}
