//! The daemon's side of one connection: many concurrent requests, each with its own task.
//!
//! The reader submits each operation before it reads the next frame, so operations reach a session
//! in the order in which they were sent. A task of its own waits for the reply.
//!
//! A request ends with its reply, or when the frontend forgets it or disconnects; then its future
//! is dropped, which for code means that it continues. Only `Cancel` interrupts. The reader never
//! waits for a request, so a slow one does not delay others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::io::AsyncRead;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::SessionHost;
use super::file_stream::{self, EofPolicy, FilePart, FileReader, FileWriter, WINDOW};
use super::frame::{self, EncodedFrame, FrameKind, IpcError, IpcFrame, MessageAssembler};
use super::frame_sender::FrameSender;
use super::message::{FromDaemon, ReplyResult, ToDaemon};
use crate::ops::{Body, Io, Op, ProgressChannel, Ticket, TransferDirection};
use crate::session::{Attached, ExecutionEnded, Principal, RecorderId, Refused};

/// Concurrent requests of one frontend, which has a few per client.
pub(super) const MAX_REQUESTS: usize = 4_096;

/// A connection to a frontend. All its requests share it.
pub(super) struct FrontendConnection {
    pub(super) host: Arc<dyn SessionHost>,
    pub(super) frames: FrameSender,
    /// The number of requests of all frontends that have no reply yet.
    pub(super) in_flight: watch::Sender<usize>,
    pub(super) requests: Mutex<HashMap<u64, ActiveRequest>>,
    /// Cancelled when the frontend disconnects.
    pub(super) closed: CancellationToken,
    /// The frontend's id in the ledger.
    recorder: RecorderId,
    /// Its registration there, once it records executions.
    attached: Mutex<Option<Attached>>,
}

/// A request without a reply.
pub(super) struct ActiveRequest {
    cancel: CancellationToken,
    forgotten: CancellationToken,
    /// Receives chunks from the frontend.
    upload: mpsc::Sender<FilePart>,
    /// Chunks that may be sent to the frontend.
    credit: Arc<Semaphore>,
}

impl FrontendConnection {
    pub(super) fn new(
        host: Arc<dyn SessionHost>,
        frames: FrameSender,
        in_flight: watch::Sender<usize>,
        recorder: RecorderId,
    ) -> Arc<FrontendConnection> {
        let (requests, closed, attached) =
            (Mutex::default(), CancellationToken::new(), Mutex::default());
        Arc::new(FrontendConnection {
            host,
            frames,
            in_flight,
            requests,
            closed,
            recorder,
            attached,
        })
    }

    /// Drops every request. Executions that the frontend has not recorded go to another one.
    pub(super) fn close(&self) {
        self.closed.cancel();
        drop(self.attached().take());
    }

    /// Sends the frontend the executions that it is to record.
    fn record(&self, takes_over: bool) {
        let mut attached = self.attached();
        if attached.is_some() {
            return;
        }
        let frames = self.frames.clone();
        let hand_over = move |number, ended: ExecutionEnded| {
            let message = FromDaemon::ExecutionEnded {
                number,
                ended: Box::new(ended),
            };
            // A frontend that has disconnected confirms nothing, so the ledger keeps the entry.
            for frame in frame::encode(0, FrameKind::Message, &message)
                .into_iter()
                .flatten()
            {
                let _ = frames.push(frame);
            }
        };
        *attached = Some(
            self.host
                .ledger()
                .attach(self.recorder, takes_over, Arc::new(hand_over)),
        );
    }

    fn attached(&self) -> MutexGuard<'_, Option<Attached>> {
        self.attached
            .lock()
            .expect("nothing panics while it holds the registration")
    }

    /// Serves requests until the frontend disconnects or sends an invalid message.
    pub(super) async fn serve(
        self: &Arc<FrontendConnection>,
        reader: &mut (impl AsyncRead + Unpin),
    ) -> Result<(), IpcError> {
        let mut assembler = MessageAssembler::default();
        while let Some(frame) = frame::read(reader).await? {
            let Some(IpcFrame { id, kind, payload }) = assembler.add(frame)? else {
                continue;
            };
            match kind {
                FrameKind::Chunk => self.receive_part(id, FilePart::Chunk(payload))?,
                FrameKind::Message => match frame::decode(&payload)? {
                    ToDaemon::Request { owner, op } => self.begin(id, &owner, *op),
                    ToDaemon::Forget => {
                        assembler.forget(id);
                        self.forget(id);
                    }
                    other => self.dispatch(id, other)?,
                },
                FrameKind::Part | FrameKind::Reply => {
                    return Err(IpcError::Unexpected("a reply from a frontend"));
                }
            }
        }
        Ok(())
    }

    fn dispatch(&self, id: u64, message: ToDaemon) -> Result<(), IpcError> {
        match message {
            ToDaemon::Cancel => {
                if let Some(request) = self.requests().get(&id) {
                    request.cancel.cancel();
                }
                Ok(())
            }
            ToDaemon::Credit(amount) => {
                if let Some(request) = self.requests().get(&id) {
                    file_stream::give_credit(&request.credit, amount);
                }
                Ok(())
            }
            ToDaemon::Heartbeat => {
                for frame in frame::encode(0, FrameKind::Message, &FromDaemon::Heartbeat)? {
                    // A frontend that has disconnected needs none.
                    let _ = self.frames.push(frame);
                }
                Ok(())
            }
            ToDaemon::RecordEndings { takes_over } => {
                self.record(takes_over);
                Ok(())
            }
            ToDaemon::Recorded(number) => {
                self.host.ledger().confirm(number);
                Ok(())
            }
            ToDaemon::EndOfFile => self.receive_part(id, FilePart::End),
            ToDaemon::FileFailed => self.receive_part(id, FilePart::Failed),
            ToDaemon::Hello(_) => Err(IpcError::Unexpected("a second hello")),
            ToDaemon::Request { .. } | ToDaemon::Forget => {
                unreachable!("the caller handles these")
            }
        }
    }

    /// Passes a part of a file on. A request that has ended needs none.
    fn receive_part(&self, id: u64, part: FilePart) -> Result<(), IpcError> {
        match self
            .requests()
            .get(&id)
            .map(|request| request.upload.try_send(part))
        {
            Some(Err(mpsc::error::TrySendError::Full(_))) => {
                Err(IpcError::Unexpected("more chunks than credits"))
            }
            _ => Ok(()),
        }
    }

    fn forget(&self, id: u64) {
        if let Some(request) = self.requests().remove(&id) {
            request.forgotten.cancel();
        }
    }

    /// Submits an operation, and spawns a task that waits for its reply.
    fn begin(self: &Arc<FrontendConnection>, number: u64, owner: &Principal, op: Op) {
        let (upload, parts) = file_stream::file_parts();
        let (cancel, forgotten) = (CancellationToken::new(), self.closed.child_token());
        let credit = Arc::new(Semaphore::new(WINDOW));
        let request = ActiveRequest {
            cancel: cancel.clone(),
            forgotten: forgotten.clone(),
            upload,
            credit: Arc::clone(&credit),
        };
        {
            let mut requests = self.requests();
            if requests.len() < MAX_REQUESTS {
                requests.insert(number, request);
            } else {
                let busy = Err(Refused::Busy {
                    waiting: MAX_REQUESTS,
                });
                tokio::spawn(Arc::clone(self).send(encoded(number, &busy)));
                return;
            }
        }
        let body = match op.transfer() {
            Some(TransferDirection::Into) => {
                let give_back = frame::encode(number, FrameKind::Message, &FromDaemon::Credit(1))
                    .expect("a credit is short")
                    .remove(0);
                let (frames, eof) = (self.frames.clone(), EofPolicy::Fails);
                Body::Source(Box::new(FileReader::new(parts, give_back, frames, eof)))
            }
            Some(TransferDirection::OutOf) => Body::Sink(Box::new(FileWriter::new(
                number,
                credit,
                self.frames.clone(),
            ))),
            None => Body::None,
        };
        let progress = ProgressChannel::default();
        let progressed = progress.subscribe();
        let io = Io {
            cancel,
            progress,
            body,
            recorder: self.recorder,
        };
        let in_flight = InFlight::new(&self.in_flight);
        let submitted = self.host.submit(owner, op, io);
        let connection = Arc::clone(self);
        tokio::spawn(async move {
            let _in_flight = in_flight;
            let answer = match submitted {
                Ok(ticket) => {
                    connection
                        .wait_for_reply(number, ticket, forgotten, progressed)
                        .await
                }
                Err(refused) => Some(Err(refused)),
            };
            if let Some(answer) = answer {
                // Removed before the reply is sent, so that the number is free when the frontend
                // has it.
                connection.requests().remove(&number);
                connection.send(encoded(number, &answer)).await;
            }
        });
    }

    /// Waits for a reply, and passes progress on meanwhile. Returns `None` if the request was
    /// forgotten.
    async fn wait_for_reply(
        &self,
        number: u64,
        mut ticket: Ticket<'_>,
        forgotten: CancellationToken,
        mut progressed: watch::Receiver<String>,
    ) -> Option<ReplyResult> {
        loop {
            tokio::select! {
                biased;
                () = forgotten.cancelled() => return None,
                answer = &mut ticket => return Some(answer),
                Ok(()) = progressed.changed() => {
                    let text = progressed.borrow_and_update().clone();
                    let progress = FromDaemon::Progress(text);
                    let news = frame::encode(number, FrameKind::Message, &progress).ok()?;
                    // Without room in the queue it is dropped; later progress replaces it.
                    news.into_iter().take(1).for_each(|frame| drop(self.frames.try_send(frame)));
                }
            }
        }
    }

    /// Sends frames one after the other, interleaved with those of other requests. Stops when the
    /// frontend has disconnected.
    async fn send(self: Arc<FrontendConnection>, frames: Vec<EncodedFrame>) {
        for frame in frames {
            if self.frames.send(frame).await.is_err() {
                return;
            }
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<u64, ActiveRequest>> {
        self.requests
            .lock()
            .expect("nothing panics while it holds the requests")
    }
}

/// Encodes a reply, or a refusal if the reply is too large to be sent.
pub(super) fn encoded(number: u64, answer: &ReplyResult) -> Vec<EncodedFrame> {
    frame::encode(number, FrameKind::Reply, answer).unwrap_or_else(|_| {
        let why = "the reply is too large to be sent".to_owned();
        let refused: ReplyResult = Err(Refused::Transfer { why });
        frame::encode(number, FrameKind::Reply, &refused).expect("a refusal is short")
    })
}

/// Counts a request until it is dropped.
struct InFlight(watch::Sender<usize>);

impl InFlight {
    fn new(count: &watch::Sender<usize>) -> InFlight {
        count.send_modify(|count| *count += 1);
        InFlight(count.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
