//! The keeper's side of one front's connection: many requests at once, each with its own task.
//!
//! A request takes its first step in the reader, before the next frame is read. With that step it
//! is in the queue of its session, so requests reach a session in the order in which they were
//! sent.
//!
//! A request ends with its answer, or when the front forgets it or is gone; then its future is dropped, which for code means that it goes on. Only `Cancel` interrupts.
//! The reader never waits for a request, so a slow one holds nobody up.

use std::collections::HashMap;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use tokio::io::AsyncRead;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::Kept;
use super::calls::{self, Hands};
use super::frame::{self, Assembly, Frame, FrameError, Kind, Written};
use super::message::{Answer, Call, FromFront, FromKeeper};
use super::outgoing::Outgoing;
use super::stream::{self, Arrival, Arriving, Leaving, Silence, WINDOW};
use crate::session::{Attached, ExecutionEnded, News, RecorderId, Refused};

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
                    FromFront::Request(call) => self.begin(id, *call),
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
            FromFront::Request(_) | FromFront::Forget => unreachable!("the caller has taken these"),
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

    fn begin(self: &Arc<Desk>, number: u64, mut call: Call) {
        match &mut call {
            Call::Execute { request, .. } => request.recorder = self.recorder,
            Call::Explore { request, .. } => request.recorder = self.recorder,
            _ => {}
        }
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
                let busy: Answer<()> = Err(Refused::Busy {
                    waiting: MOST_REQUESTS,
                });
                tokio::spawn(Arc::clone(self).send(calls::written(number, &busy)));
                return;
            }
        }
        let give_back = frame::write(number, Kind::Message, &FromKeeper::Credit(1))
            .expect("a credit is short")
            .remove(0);
        let news = News::new(String::new());
        let heard = news.subscribe();
        let hands = Hands {
            cancel,
            news,
            source: Arriving::new(
                arrivals,
                give_back,
                self.frames.clone(),
                Silence::IsAFailure,
            ),
            sink: Leaving::new(number, credit, self.frames.clone()),
        };
        let ticket = Ticket::new(&self.underway);
        let desk = Arc::clone(self);
        let mut work = Box::pin(async move {
            let _ticket = ticket;
            if let Some(answer) = desk.answer(number, call, hands, forgotten, heard).await {
                // In this order, so that a front that reuses nothing never finds a number taken.
                desk.requests().remove(&number);
                desk.send(answer).await;
            }
        });
        if first_step(work.as_mut()).is_pending() {
            tokio::spawn(work);
        }
    }

    /// Carries a call out while its news are passed on. Returns nothing when nobody wants the answer.
    async fn answer(
        &self,
        number: u64,
        call: Call,
        hands: Hands<Arriving, Leaving>,
        forgotten: CancellationToken,
        mut heard: watch::Receiver<String>,
    ) -> Option<Vec<Written>> {
        let mut work = pin!(calls::carry_out(&*self.kept, number, call, hands));
        loop {
            tokio::select! {
                biased;
                () = forgotten.cancelled() => return None,
                answer = &mut work => return Some(answer),
                Ok(()) = heard.changed() => {
                    let text = heard.borrow_and_update().clone();
                    let news = frame::write(number, Kind::Message, &FromKeeper::News(text)).ok()?;
                    // Where there is no room, later news say more.
                    news.into_iter().take(1).for_each(|frame| drop(self.frames.try_send(frame)));
                }
            }
        }
    }

    /// Sends frames one after the other, in turn with those of other requests. A front that is gone needs none.
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

/// Lets a request take its first step here and now. Whoever goes on with it polls it again, so no
/// wake-up is lost.
fn first_step(work: Pin<&mut impl Future<Output = ()>>) -> Poll<()> {
    // Constrained, the step might end before the request is in its session's queue.
    pin!(tokio::task::unconstrained(work)).poll(&mut Context::from_waker(Waker::noop()))
}

/// Counts a request for as long as it is being answered.
struct Ticket(watch::Sender<usize>);

impl Ticket {
    fn new(underway: &watch::Sender<usize>) -> Ticket {
        underway.send_modify(|count| *count += 1);
        Ticket(underway.clone())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
