//! The keeper's side of one front's connection: many requests at once, each with its own task.
//!
//! The reader submits each operation before it reads the next frame, so operations reach a session
//! in the order in which they were sent. A task of its own waits for the reply.
//!
//! A request ends with its answer, or when the front forgets it or is gone; then its future is
//! dropped, which for code means that it goes on. Only `Cancel` interrupts. The reader never waits
//! for a request, so a slow one holds nobody up.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::io::AsyncRead;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::Kept;
use super::frame::{self, Assembly, Frame, FrameError, Kind, Written};
use super::message::{Answer, FromFront, FromKeeper};
use super::outgoing::Outgoing;
use super::stream::{self, Arrival, Arriving, Leaving, Silence, WINDOW};
use crate::ops::{Body, Io, News, Op, Ticket, Transfer};
use crate::session::{Attached, ExecutionEnded, Principal, RecorderId, Refused};

/// Requests of one front at the same time. A front has a few per client of its own.
pub(super) const MOST_REQUESTS: usize = 4_096;

/// What all requests of a connection share.
pub(super) struct Desk {
    pub(super) kept: Arc<dyn Kept>,
    pub(super) frames: Outgoing,
    /// How many requests of all fronts are being answered.
    pub(super) underway: watch::Sender<usize>,
    pub(super) requests: Mutex<HashMap<u64, Request>>,
    /// The front is gone.
    pub(super) gone: CancellationToken,
    /// The front's name in the ledger.
    recorder: RecorderId,
    /// Its place there, once it has said that it records.
    attached: Mutex<Option<Attached>>,
}

/// What can still be said about a request.
pub(super) struct Request {
    cancel: CancellationToken,
    forgotten: CancellationToken,
    /// Where chunks from the front go.
    upload: mpsc::Sender<Arrival>,
    /// Chunks that may be sent to the front.
    credit: Arc<Semaphore>,
}

impl Desk {
    pub(super) fn new(
        kept: Arc<dyn Kept>,
        frames: Outgoing,
        underway: watch::Sender<usize>,
        recorder: RecorderId,
    ) -> Arc<Desk> {
        let (requests, gone, attached) =
            (Mutex::default(), CancellationToken::new(), Mutex::default());
        Arc::new(Desk {
            kept,
            frames,
            underway,
            requests,
            gone,
            recorder,
            attached,
        })
    }

    /// Lets go of every request. What the front has not recorded goes to another.
    pub(super) fn leave(&self) {
        self.gone.cancel();
        drop(self.attached().take());
    }

    /// Hands the front the executions that it is to record.
    fn record(&self, takes_over: bool) {
        let mut attached = self.attached();
        if attached.is_some() {
            return;
        }
        let frames = self.frames.clone();
        let hand_over = move |number, ended: ExecutionEnded| {
            let message = FromKeeper::Ended {
                number,
                ended: Box::new(ended),
            };
            // A front that is gone confirms nothing, so the ledger keeps the entry.
            for frame in frame::write(0, Kind::Message, &message)
                .into_iter()
                .flatten()
            {
                let _ = frames.push(frame);
            }
        };
        *attached = Some(
            self.kept
                .ledger()
                .attach(self.recorder, takes_over, Arc::new(hand_over)),
        );
    }

    fn attached(&self) -> MutexGuard<'_, Option<Attached>> {
        self.attached
            .lock()
            .expect("nothing panics while it holds the place")
    }

    /// Answers requests until the front leaves or says what makes no sense.
    pub(super) async fn serve(
        self: &Arc<Desk>,
        reader: &mut (impl AsyncRead + Unpin),
    ) -> Result<(), FrameError> {
        let mut assembly = Assembly::default();
        while let Some(frame) = frame::read(reader).await? {
            let Some(Frame { id, kind, payload }) = assembly.add(frame)? else {
                continue;
            };
            match kind {
                Kind::Chunk => self.arrived(id, Arrival::Chunk(payload))?,
                Kind::Message => match frame::content(&payload)? {
                    FromFront::Request { owner, op } => self.begin(id, &owner, *op),
                    FromFront::Forget => {
                        assembly.forget(id);
                        self.forget(id);
                    }
                    other => self.hear(id, other)?,
                },
                Kind::Part | Kind::Answer => {
                    return Err(FrameError::OutOfTurn("a front answers nothing"));
                }
            }
        }
        Ok(())
    }

    fn hear(&self, id: u64, message: FromFront) -> Result<(), FrameError> {
        match message {
            FromFront::Cancel => {
                if let Some(request) = self.requests().get(&id) {
                    request.cancel.cancel();
                }
                Ok(())
            }
            FromFront::Credit(amount) => {
                if let Some(request) = self.requests().get(&id) {
                    stream::give_credit(&request.credit, amount);
                }
                Ok(())
            }
            FromFront::Beat => {
                for frame in frame::write(0, Kind::Message, &FromKeeper::Beat)? {
                    // A front that is gone needs none.
                    let _ = self.frames.push(frame);
                }
                Ok(())
            }
            FromFront::Records { takes_over } => {
                self.record(takes_over);
                Ok(())
            }
            FromFront::Recorded(number) => {
                self.kept.ledger().confirm(number);
                Ok(())
            }
            FromFront::NoMore => self.arrived(id, Arrival::End),
            FromFront::SourceFailed => self.arrived(id, Arrival::Failed),
            FromFront::Hello(_) => Err(FrameError::OutOfTurn("a second hello")),
            FromFront::Request { .. } | FromFront::Forget => {
                unreachable!("the caller has taken these")
            }
        }
    }

    /// Hands a part of a file on. A request that is over needs none.
    fn arrived(&self, id: u64, arrival: Arrival) -> Result<(), FrameError> {
        match self
            .requests()
            .get(&id)
            .map(|request| request.upload.try_send(arrival))
        {
            Some(Err(mpsc::error::TrySendError::Full(_))) => {
                Err(FrameError::OutOfTurn("more chunks than credits"))
            }
            _ => Ok(()),
        }
    }

    fn forget(&self, id: u64) {
        if let Some(request) = self.requests().remove(&id) {
            request.forgotten.cancel();
        }
    }

    /// Submits an operation, and has a task wait for its reply.
    fn begin(self: &Arc<Desk>, number: u64, owner: &Principal, op: Op) {
        let (upload, arrivals) = stream::arrivals();
        let (cancel, forgotten) = (CancellationToken::new(), self.gone.child_token());
        let credit = Arc::new(Semaphore::new(WINDOW));
        let request = Request {
            cancel: cancel.clone(),
            forgotten: forgotten.clone(),
            upload,
            credit: Arc::clone(&credit),
        };
        {
            let mut requests = self.requests();
            if requests.len() < MOST_REQUESTS {
                requests.insert(number, request);
            } else {
                let busy = Err(Refused::Busy {
                    waiting: MOST_REQUESTS,
                });
                tokio::spawn(Arc::clone(self).send(written(number, &busy)));
                return;
            }
        }
        let body = match op.transfer() {
            Some(Transfer::Into) => {
                let give_back = frame::write(number, Kind::Message, &FromKeeper::Credit(1))
                    .expect("a credit is short")
                    .remove(0);
                let (frames, silence) = (self.frames.clone(), Silence::IsAFailure);
                Body::Source(Box::new(Arriving::new(
                    arrivals, give_back, frames, silence,
                )))
            }
            Some(Transfer::OutOf) => {
                Body::Sink(Box::new(Leaving::new(number, credit, self.frames.clone())))
            }
            None => Body::None,
        };
        let progress = News::default();
        let heard = progress.subscribe();
        let io = Io {
            cancel,
            progress,
            body,
            recorder: self.recorder,
        };
        let underway = Underway::new(&self.underway);
        let submitted = self.kept.submit(owner, op, io);
        let desk = Arc::clone(self);
        tokio::spawn(async move {
            let _underway = underway;
            let answer = match submitted {
                Ok(ticket) => desk.answer(number, ticket, forgotten, heard).await,
                Err(refused) => Some(Err(refused)),
            };
            if let Some(answer) = answer {
                // In this order, so that a front that reuses nothing never finds a number taken.
                desk.requests().remove(&number);
                desk.send(written(number, &answer)).await;
            }
        });
    }

    /// Waits for a reply while progress is passed on. Returns nothing when nobody wants the reply.
    async fn answer(
        &self,
        number: u64,
        mut ticket: Ticket<'_>,
        forgotten: CancellationToken,
        mut heard: watch::Receiver<String>,
    ) -> Option<Answer> {
        loop {
            tokio::select! {
                biased;
                () = forgotten.cancelled() => return None,
                answer = &mut ticket => return Some(answer),
                Ok(()) = heard.changed() => {
                    let text = heard.borrow_and_update().clone();
                    let news = frame::write(number, Kind::Message, &FromKeeper::News(text)).ok()?;
                    // Where there is no room, later news say more.
                    news.into_iter().take(1).for_each(|frame| drop(self.frames.try_send(frame)));
                }
            }
        }
    }

    /// Sends frames one after the other, in turn with those of other requests. A front that is gone
    /// needs none.
    async fn send(self: Arc<Desk>, frames: Vec<Written>) {
        for frame in frames {
            if self.frames.send(frame).await.is_err() {
                return;
            }
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<u64, Request>> {
        self.requests
            .lock()
            .expect("nothing panics while it holds the requests")
    }
}

/// Writes an answer, or says that it is too large to be sent.
pub(super) fn written(number: u64, answer: &Answer) -> Vec<Written> {
    frame::write(number, Kind::Answer, answer).unwrap_or_else(|_| {
        let why = "the answer is too large to be handed on".to_owned();
        let refused: Answer = Err(Refused::Transfer { why });
        frame::write(number, Kind::Answer, &refused).expect("a refusal is short")
    })
}

/// Counts a request for as long as it is being answered.
struct Underway(watch::Sender<usize>);

impl Underway {
    fn new(count: &watch::Sender<usize>) -> Underway {
        count.send_modify(|count| *count += 1);
        Underway(count.clone())
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
