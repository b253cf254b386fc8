//! Exploration: several cells tried in parallel, each in its own fork.
//!
//! All forks are made from one copy, so every variant starts with the same state, and the source is
//! free again before the first variant runs. All are given the same seed, so they differ only by
//! their code. A fork has a driver like any session, but cannot be found by others. When the
//! variants have ended, those to be kept hand over their sandbox and interpreter: to a new session,
//! or to the source itself. The others are destroyed, also when the caller disconnects.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;

use super::driver::{DriverCommand, ForkedSession, ForksWanted, UnstartedFork};
use super::manager::{DriverHandle, shut_down};
use super::{
    Approver, ExecuteRequest, ExploreReport, ExploreRequest, Keep, MAX_CODE_BYTES, MAX_VARIANTS,
    Outcome, Part, Principal, ProgressChannel, Refused, SessionId, Sessions, Status, Stream,
    Variant, VariantReport,
};

/// Limit in characters for a score's text, and for the reason why there is none.
const MAX_SCORE_LENGTH: usize = 200;

impl Sessions {
    /// Runs each variant in its own fork, up to the configured number concurrently, and keeps the
    /// requested ones.
    ///
    /// A cancelled token interrupts the variants, and nothing is kept. Dropping the future ends
    /// them too.
    pub async fn explore(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: ExploreRequest,
        cancel: CancellationToken,
        progress: ProgressChannel,
    ) -> Result<ExploreReport, Refused> {
        check(&request)?;
        if cancel.is_cancelled() {
            return Err(Refused::CancelledWhileWaiting);
        }
        let source = self.find(owner, id)?;
        self.take_room_for_variants(owner, request.variants.len(), sessions_made(&request))?;
        let total = request.variants.len();
        let wanted = ForksWanted {
            count: total,
            undoable: false,
        };
        let ForkedSession { forks, lost, .. } =
            self.fork_of(owner, id, &source, wanted, &cancel).await?;
        let named = request.variants.iter().map(|variant| variant.name.as_str());
        let seed = random_seed();
        let hidden = named
            .zip(forks)
            .map(|(name, fork)| self.hide(owner, id, name, fork, seed));
        let entries = hidden.collect::<Result<Vec<_>, _>>()?;

        let exploration = Exploration {
            sessions: self,
            owner,
            id,
            source,
            request: &request,
            permits: Semaphore::new(self.settings().explore_parallel.max(1)),
            cancel: &cancel,
            finished: AtomicUsize::new(0),
            progress,
        };
        let runs = request.variants.iter().zip(&entries);
        let variants = join_all(runs.map(|(variant, entry)| exploration.run(variant, entry))).await;

        let mut report = ExploreReport {
            variants,
            kept: Vec::new(),
            replaced: false,
            notes: Vec::new(),
            lost,
        };
        if cancel.is_cancelled() {
            report
                .notes
                .push("The exploration was cancelled; nothing is kept.".to_owned());
        } else {
            for place in chosen(&request.keep, &mut report) {
                exploration
                    .keep(&request.variants[place].name, &entries[place], &mut report)
                    .await;
            }
        }
        join_all(entries.iter().map(shut_down)).await;
        Ok(report)
    }
}

/// State shared by the runs of one exploration.
struct Exploration<'a> {
    sessions: &'a Sessions,
    owner: &'a Principal,
    id: &'a SessionId,
    source: DriverHandle,
    request: &'a ExploreRequest,
    permits: Semaphore,
    cancel: &'a CancellationToken,
    finished: AtomicUsize,
    progress: ProgressChannel,
}

impl Exploration<'_> {
    /// Waits for a slot, runs one variant, and scores it.
    async fn run(&self, variant: &Variant, entry: &DriverHandle) -> VariantReport {
        let permit = tokio::select! {
            permit = self.permits.acquire() => permit.ok(),
            () = self.cancel.cancelled() => None,
        };
        let ended = match &permit {
            Some(_) => {
                self.execute(entry, variant.code.clone(), self.request.max_output_chars)
                    .await
            }
            None => Err(Refused::CancelledWhileWaiting),
        };
        let score = match &self.request.keep {
            Keep::Best { by } => Some(match &ended {
                Ok(Outcome {
                    status: Status::Completed,
                    ..
                }) => self.score(entry, by).await,
                _ => Err("the variant did not complete".to_owned()),
            }),
            _ => None,
        };
        drop(permit);
        if !may_be_kept(&self.request.keep, &variant.name) {
            shut_down(entry).await;
        }
        let finished = self.finished.fetch_add(1, Ordering::Relaxed) + 1;
        self.progress.send_replace(format!(
            "{finished} of {} variants finished",
            self.request.variants.len()
        ));
        VariantReport {
            name: variant.name.clone(),
            ended,
            score,
        }
    }

    async fn execute(
        &self,
        entry: &DriverHandle,
        code: String,
        max_output_chars: usize,
    ) -> Result<Outcome, Refused> {
        let ExploreRequest {
            timeout, recorder, ..
        } = *self.request;
        let request = ExecuteRequest {
            code,
            timeout,
            max_output_chars,
            asking: Approver::Exploration,
            rules: None,
            recorder,
        };
        self.sessions.execute_in(entry, request, self.cancel).await
    }

    /// Evaluates the expression by which variants are compared.
    async fn score(&self, entry: &DriverHandle, by: &str) -> Result<f64, String> {
        // The newline also ends a trailing comment.
        let outcome = self
            .execute(entry, format!("float({by}\n)"), MAX_SCORE_LENGTH)
            .await;
        score_of(&outcome.map_err(|refused| refused.to_string())?)
    }

    /// FairScheduler a variant's fork into a session, or replaces the source with it.
    async fn keep(&self, name: &str, entry: &DriverHandle, report: &mut ExploreReport) {
        let id = self.id;
        let Some(mut fork) = surrendered(entry).await else {
            report.notes.push(format!(
                "Variant `{name}` is not kept, because its Python has ended."
            ));
            return;
        };
        if self.request.replace {
            match adopted(&self.source, fork, name).await {
                Ok(()) => {
                    self.source.shared.outputs.take_over(&entry.shared.outputs);
                    report.notes.push(format!(
                        "`{id}` goes on as the variant `{name}`; cells that ran in it before \
                         cannot be undone any more."
                    ));
                    report.replaced = true;
                    report.kept.push((name.to_owned(), id.clone()));
                    return;
                }
                Err(Some(back)) => {
                    report.notes.push(format!(
                        "`{id}` is in use or gone, so variant `{name}` did not take its place and \
                         is a session of its own."
                    ));
                    fork = back;
                }
                Err(None) => {
                    report.notes.push(format!(
                        "`{id}` ended while variant `{name}` took its place; neither is left."
                    ));
                    return;
                }
            }
        }
        let note = format!("This session is the variant `{name}` of a cell explored in `{id}`.");
        match self
            .sessions
            .reserve_for_variant(self.owner, id, name, note, entry.shared.clone())
        {
            Ok(reservation) => report.kept.push((name.to_owned(), reservation.take(fork))),
            Err(refused) => report
                .notes
                .push(format!("Variant `{name}` is not kept: {refused}.")),
        }
    }
}

fn check(request: &ExploreRequest) -> Result<(), Refused> {
    let wrong = |why: String| Err(Refused::Explore { why });
    let ExploreRequest {
        variants,
        keep,
        replace,
        ..
    } = request;
    if variants.is_empty() || variants.len() > MAX_VARIANTS {
        return wrong(format!(
            "{} variants were given, and between 1 and {MAX_VARIANTS} can be tried",
            variants.len()
        ));
    }
    for (place, variant) in variants.iter().enumerate() {
        if variant.code.len() > MAX_CODE_BYTES {
            return Err(Refused::CodeTooLarge {
                size: variant.code.len(),
            });
        }
        if variants[..place]
            .iter()
            .any(|earlier| earlier.name == variant.name)
        {
            return wrong(format!(
                "two variants are called `{}`; give each a name of its own",
                variant.name
            ));
        }
    }
    match keep {
        Keep::Named(name) if !variants.iter().any(|variant| variant.name == *name) => wrong(
            format!("`{name}` is to be kept, and no variant is called so"),
        ),
        Keep::Best { by } if by.trim().is_empty() => {
            wrong("the expression that variants are compared by is empty".to_owned())
        }
        Keep::Nothing | Keep::All if *replace => wrong(
            "only one variant can take the place of the session; keep the best one or a named one"
                .to_owned(),
        ),
        _ => Ok(()),
    }
}

/// Returns the random seed of all variants of one exploration.
fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel has random bytes");
    u64::from_le_bytes(bytes)
}

fn sessions_made(request: &ExploreRequest) -> usize {
    match request.keep {
        Keep::Nothing => 0,
        _ if request.replace => 0,
        Keep::All => request.variants.len(),
        Keep::Named(_) | Keep::Best { .. } => 1,
    }
}

fn may_be_kept(keep: &Keep, variant: &str) -> bool {
    match keep {
        Keep::Nothing => false,
        Keep::All | Keep::Best { .. } => true,
        Keep::Named(name) => name == variant,
    }
}

/// Returns the indices of the variants to keep. Adds a note if there is no best one.
fn chosen(keep: &Keep, report: &mut ExploreReport) -> Vec<usize> {
    let variants = report.variants.iter().enumerate();
    match keep {
        Keep::Nothing => Vec::new(),
        Keep::All => (0..report.variants.len()).collect(),
        Keep::Named(name) => variants
            .filter(|(_, variant)| variant.name == *name)
            .map(|(place, _)| place)
            .collect(),
        Keep::Best { .. } => {
            let scores = variants.filter_map(|(place, variant)| match variant.score {
                Some(Ok(score)) => Some((place, score)),
                _ => None,
            });
            // Among equals, the first one in the request wins.
            let best = scores.reduce(|best, next| if next.1 > best.1 { next } else { best });
            if best.is_none() {
                report
                    .notes
                    .push("No variant has a score, so none is kept.".to_owned());
            }
            best.map(|(place, _)| place).into_iter().collect()
        }
    }
}

/// Parses the score from the outcome of its cell.
fn score_of(outcome: &Outcome) -> Result<f64, String> {
    match &outcome.status {
        Status::Completed => {}
        Status::Raised(error) => {
            let text = format!("the expression raised {}: {}", error.name, error.message);
            return Err(text.chars().take(MAX_SCORE_LENGTH).collect());
        }
        other => {
            return Err(format!(
                "the expression did not complete ({})",
                other.name()
            ));
        }
    }
    let value = outcome
        .output
        .parts
        .iter()
        .rev()
        .find_map(|part| match part {
            Part::Text {
                stream: Stream::Value,
                text,
            } => text.trim().parse::<f64>().ok(),
            _ => None,
        });
    match value {
        Some(value) if value.is_nan() => Err("the expression is not a number (nan)".to_owned()),
        Some(value) => Ok(value),
        None => Err("the expression gave no number".to_owned()),
    }
}

async fn surrendered(entry: &DriverHandle) -> Option<Box<UnstartedFork>> {
    let (reply, answer) = oneshot::channel();
    entry
        .commands
        .send(DriverCommand::Surrender(reply))
        .await
        .ok()?;
    answer.await.ok().flatten()
}

/// Replaces the source with a fork. The fork is returned if that is not possible; `None` if it is
/// lost with the source.
async fn adopted(
    source: &DriverHandle,
    fork: Box<UnstartedFork>,
    name: &str,
) -> Result<(), Option<Box<UnstartedFork>>> {
    let (reply, answer) = oneshot::channel();
    let note = format!(
        "This session goes on as the variant `{name}` that was explored; cells before that cannot \
         be undone."
    );
    if let Err(back) = source
        .commands
        .send(DriverCommand::Adopt { fork, note, reply })
        .await
    {
        return match back.0 {
            DriverCommand::Adopt { fork, .. } => Err(Some(fork)),
            _ => Err(None),
        };
    }
    match answer.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(fork)) => Err(Some(fork)),
        Err(_) => Err(None),
    }
}
