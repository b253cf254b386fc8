//! Uploads, downloads, file lists and package folders: requests that end with one claim.

use std::io::{self, Read, Seek, Write};

use tempfile::SpooledTempFile;
use tokio::sync::oneshot;

use super::STAGED_IN_MEMORY;
use super::requests::{FileData, ReadExtent, Transfer};
use super::wording::{file_failed, file_list};
use crate::runner_client::{Claim, FileFailure, MAX_LISTED, Request};
use crate::session::install::LoadedModules;
use crate::session::output::bounded_text;
use crate::session::state::RequestId;
use crate::session::{FileList, InsidePath, Refused};

/// Bytes of a file in one frame.
const CHUNK: usize = 256 * 1024;

/// The result of a transfer, and its receiver.
struct Reply<T> {
    result: Option<Result<T, Refused>>,
    sender: oneshot::Sender<Result<T, Refused>>,
}

impl<T> Reply<T> {
    fn new(sender: oneshot::Sender<Result<T, Refused>>) -> Reply<T> {
        Reply {
            result: None,
            sender,
        }
    }

    fn is_ok(&self) -> bool {
        matches!(self.result, Some(Ok(_)))
    }

    fn send(self, ended: Result<(), Refused>) {
        let result = self.result;
        let result =
            ended.and_then(|()| result.expect("a transfer without a result has not ended well"));
        let _ = self.sender.send(result);
    }
}

/// A file that is copied into the session.
pub(super) struct UploadTransfer {
    id: RequestId,
    path: InsidePath,
    source: SpooledTempFile,
    all_sent: bool,
    reply: Reply<u64>,
}

impl UploadTransfer {
    pub(super) fn begin(
        id: RequestId,
        path: InsidePath,
        overwrite: bool,
        source: SpooledTempFile,
        reply: oneshot::Sender<Result<u64, Refused>>,
    ) -> (Request, Box<dyn Transfer>) {
        let request = Request::WriteBegin {
            id,
            path: path.as_str().to_owned(),
            overwrite,
        };
        let upload = UploadTransfer {
            id,
            path,
            source,
            all_sent: false,
            reply: Reply::new(reply),
        };
        (request, Box::new(upload))
    }
}

impl Transfer for UploadTransfer {
    fn take(&mut self, claim: Claim) -> Result<(), String> {
        match claim {
            Claim::Written { size, .. } => self.reply.result = Some(Ok(size)),
            Claim::Failed {
                reason, message, ..
            } => self.reply.result = Some(Err(file_failed(&self.path, reason, message))),
            _ => {}
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.reply.result.is_some()
    }

    fn has_changed(&self) -> bool {
        self.reply.is_ok()
    }

    fn next_frame(&mut self) -> io::Result<Option<(Request, Vec<u8>)>> {
        let id = self.id;
        if self.all_sent || self.is_over() {
            return Ok(None);
        }
        let mut chunk = Vec::with_capacity(CHUNK);
        let source = Read::by_ref(&mut self.source);
        source.take(CHUNK as u64).read_to_end(&mut chunk)?;
        self.all_sent = chunk.is_empty();
        let request = match self.all_sent {
            true => Request::WriteEnd { id },
            false => Request::WriteData { id },
        };
        Ok(Some((request, chunk)))
    }

    fn answer(self: Box<Self>, ended: Result<(), Refused>) -> Vec<String> {
        self.reply.send(ended);
        Vec::new()
    }
}

/// A file, or a part of one, that is copied out of the session.
pub(super) struct DownloadTransfer {
    path: InsidePath,
    limit: u64,
    bytes: SpooledTempFile,
    sent: u64,
    reply: Reply<FileData>,
}

impl DownloadTransfer {
    pub(super) fn begin(
        id: RequestId,
        path: InsidePath,
        what: ReadExtent,
        reply: oneshot::Sender<Result<FileData, Refused>>,
    ) -> (Request, Box<dyn Transfer>) {
        let name = path.as_str().to_owned();
        let (request, limit) = match what {
            ReadExtent::Whole { limit } => {
                let path = name;
                (Request::ReadFile { id, path, limit }, limit)
            }
            ReadExtent::Part { offset, length } => {
                let request = Request::ReadFilePart {
                    id,
                    path: name,
                    offset,
                    length,
                };
                (request, length)
            }
        };
        let download = DownloadTransfer {
            path,
            limit,
            bytes: SpooledTempFile::new(STAGED_IN_MEMORY),
            sent: 0,
            reply: Reply::new(reply),
        };
        (request, Box::new(download))
    }

    /// Returns the data, once the runner has claimed the end of it.
    fn finish(&mut self, size: u64, total: u64, version: String) -> Result<FileData, Refused> {
        // The number of bytes read is authoritative. A different claim means that the file is
        // incomplete.
        if size != self.sent {
            let why = "it changed while it was read".to_owned();
            return Err(file_failed(&self.path, FileFailure::Other, why));
        }
        let mut bytes = std::mem::replace(&mut self.bytes, SpooledTempFile::new(0));
        bytes.rewind().map_err(not_staged)?;
        Ok(FileData {
            bytes,
            sent: self.sent,
            total,
            version,
        })
    }
}

impl Transfer for DownloadTransfer {
    fn take(&mut self, claim: Claim) -> Result<(), String> {
        match claim {
            _ if self.is_over() => {}
            Claim::FileData { bytes, .. } => {
                self.sent += bytes.len() as u64;
                if self.sent > self.limit {
                    return Err("more bytes of a file were sent than asked for".to_owned());
                }
                if let Err(error) = self.bytes.write_all(&bytes) {
                    self.reply.result = Some(Err(not_staged(error)));
                }
            }
            Claim::FileEnd {
                size,
                total,
                version,
                ..
            } => self.reply.result = Some(self.finish(size, total, version)),
            Claim::Failed {
                reason, message, ..
            } => self.reply.result = Some(Err(file_failed(&self.path, reason, message))),
            _ => {}
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.reply.result.is_some()
    }

    fn answer(self: Box<Self>, ended: Result<(), Refused>) -> Vec<String> {
        self.reply.send(ended);
        Vec::new()
    }
}

/// Reports that the host's own copy of a file failed.
fn not_staged(error: io::Error) -> Refused {
    Refused::Transfer {
        why: error.kind().to_string(),
    }
}

/// A list of the session's files.
pub(super) struct Listing {
    reply: Reply<FileList>,
}

impl Listing {
    pub(super) fn begin(
        id: RequestId,
        reply: oneshot::Sender<Result<FileList, Refused>>,
    ) -> (Request, Box<dyn Transfer>) {
        let request = Request::ListFiles {
            id,
            limit: MAX_LISTED,
        };
        let reply = Reply::new(reply);
        (request, Box::new(Listing { reply }))
    }
}

impl Transfer for Listing {
    fn take(&mut self, claim: Claim) -> Result<(), String> {
        match claim {
            Claim::FileList {
                entries, omitted, ..
            } => self.reply.result = Some(Ok(file_list(entries, omitted))),
            Claim::Failed { message, .. } => {
                let why = bounded_text(&message, 500);
                self.reply.result = Some(Err(Refused::Transfer { why }));
            }
            _ => {}
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.reply.result.is_some()
    }

    fn answer(self: Box<Self>, ended: Result<(), Refused>) -> Vec<String> {
        self.reply.send(ended);
        Vec::new()
    }
}

/// Package folders that become importable.
pub(super) struct PackageFolders {
    paths: Vec<String>,
    reply: Reply<LoadedModules>,
}

impl PackageFolders {
    pub(super) fn begin(
        id: RequestId,
        paths: Vec<String>,
        reply: oneshot::Sender<Result<LoadedModules, Refused>>,
    ) -> (Request, Box<dyn Transfer>) {
        let request = Request::Packages {
            id,
            paths: paths.clone(),
        };
        let reply = Reply::new(reply);
        (request, Box::new(PackageFolders { paths, reply }))
    }
}

impl Transfer for PackageFolders {
    fn take(&mut self, claim: Claim) -> Result<(), String> {
        match claim {
            Claim::PackagesAdded {
                loaded, preloaded, ..
            } => {
                let modules = LoadedModules {
                    all: loaded,
                    preloaded,
                };
                self.reply.result = Some(Ok(modules));
            }
            Claim::Failed { message, .. } => {
                self.reply.result = Some(Err(Refused::NotAdded { why: message }));
            }
            _ => {}
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.reply.result.is_some()
    }

    fn has_changed(&self) -> bool {
        self.reply.is_ok()
    }

    fn answer(self: Box<Self>, ended: Result<(), Refused>) -> Vec<String> {
        let added = ended.is_ok() && self.reply.is_ok();
        self.reply.send(ended);
        if added { self.paths } else { Vec::new() }
    }
}
