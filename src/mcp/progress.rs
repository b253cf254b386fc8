//! Progress of a call, for clients that asked for it.
//!
//! While the one-time work of the backend goes on, each of its steps is reported, at most four a
//! second. After that, a call tells what it is at (the latest line of output, a step, how many
//! variants have finished), and one without news says every few seconds that it runs. The figure is
//! the time that has passed, because it is the only one that always grows; the sentence beside it
//! is for a person.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::duration::Seconds;
use crate::sandbox::Preparation;
use crate::session::ProgressChannel;

/// Steps may come in bursts; a person cannot read more than this.
const BETWEEN_STEPS: Duration = Duration::from_millis(250);

/// How often a call without news says that it is still at work.
const BETWEEN_SIGNS_OF_LIFE: Duration = Duration::from_secs(5);

/// One report: seconds since the call began, always more than in the report before, and a sentence.
#[derive(Debug, PartialEq)]
pub(super) struct ProgressReport {
    pub(super) progress: f64,
    pub(super) message: String,
}

/// Makes the reports of one call.
pub(super) struct Reporter {
    preparation: watch::Receiver<Preparation>,
    news: watch::Receiver<String>,
    timeout: Duration,
    started: Instant,
    last: Option<(Instant, String)>,
    last_progress: f64,
}

impl Reporter {
    /// Reports the news of a call that may take so long.
    pub(super) fn new(
        preparation: watch::Receiver<Preparation>,
        timeout: Duration,
        news: &ProgressChannel,
    ) -> Reporter {
        let started = Instant::now();
        Reporter {
            preparation,
            news: news.subscribe(),
            timeout,
            started,
            last: None,
            last_progress: 0.0,
        }
    }

    /// Waits for the next thing worth reporting. Never ends by itself.
    pub(super) async fn next(&mut self) -> ProgressReport {
        let message = loop {
            let step = self.step();
            let (said_at, said) = match &self.last {
                Some((at, message)) => (*at, Some(message)),
                None => (self.started, None),
            };
            match step {
                Some(step) if said != Some(&step) => {
                    if said.is_none() {
                        break step;
                    }
                    sleep_until(said_at + BETWEEN_STEPS).await;
                    // Later steps may have come meanwhile; only the newest is worth a message.
                    break self.step().unwrap_or(step);
                }
                Some(step) => tokio::select! {
                    () = news(&mut self.preparation) => {}
                    () = news(&mut self.news) => {}
                    () = sleep_until(said_at + BETWEEN_SIGNS_OF_LIFE) => break step,
                },
                None => tokio::select! {
                    () = news(&mut self.preparation) => {}
                    () = news(&mut self.news) => {}
                    () = sleep_until(said_at + BETWEEN_SIGNS_OF_LIFE) => {
                        let elapsed = Duration::from_secs(self.started.elapsed().as_secs());
                        break format!("running for {} (time-out \
                                       {})", Seconds(elapsed), Seconds(self.timeout));
                    }
                },
            }
        };
        self.last = Some((Instant::now(), message.clone()));
        // The clock's grain must not make two reports equal: the protocol wants each greater than
        // the last.
        self.last_progress = self
            .started
            .elapsed()
            .as_secs_f64()
            .max(self.last_progress + 0.001);
        ProgressReport {
            progress: self.last_progress,
            message,
        }
    }

    /// Says what the call is at, if there is more to say than that it runs.
    fn step(&mut self) -> Option<String> {
        let prepared = step_text(&self.preparation.borrow_and_update());
        prepared
            .or_else(|| Some(self.news.borrow_and_update().clone()).filter(|news| !news.is_empty()))
    }
}

/// Waits for a change. When the sender is gone there is no more news, and waiting goes on for ever.
async fn news<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending().await
    }
}

fn step_text(preparation: &Preparation) -> Option<String> {
    match preparation {
        Preparation::Working {
            step,
            done,
            total: Some(total),
        } => Some(format!("preparing: {step} ({done} of {total})")),
        Preparation::Working { step, .. } => Some(format!("preparing: {step}")),
        Preparation::Ready | Preparation::Failed { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn working(step: &str) -> Preparation {
        Preparation::Working {
            step: step.to_owned(),
            done: 1,
            total: Some(3),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_under_way_is_reported_at_once() {
        let (_sender, preparation) = watch::channel(working("installing numpy"));
        let started = Instant::now();
        let report = Reporter::new(
            preparation,
            Duration::from_secs(120),
            &ProgressChannel::default(),
        )
        .next()
        .await;
        assert_eq!(report.message, "preparing: installing numpy (1 of 3)");
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_of_steps_gives_at_most_four_reports_a_second_and_the_newest_wins() {
        let (sender, preparation) = watch::channel(working("a"));
        let mut reporter = Reporter::new(
            preparation,
            Duration::from_secs(120),
            &ProgressChannel::default(),
        );
        let started = Instant::now();
        let first = reporter.next().await;
        sender.send(working("b")).unwrap();
        let late = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            sender.send(working("c")).unwrap();
        };
        let (second, ()) = tokio::join!(reporter.next(), late);
        assert_eq!(second.message, "preparing: c (1 of 3)");
        assert_eq!(started.elapsed(), BETWEEN_STEPS);
        assert!(second.progress > first.progress);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_call_gives_a_sign_of_life_every_five_seconds() {
        let (_sender, preparation) = watch::channel(Preparation::Ready);
        let mut reporter = Reporter::new(
            preparation,
            Duration::from_secs(120),
            &ProgressChannel::default(),
        );
        let started = Instant::now();
        assert_eq!(
            reporter.next().await.message,
            "running for 5 s (time-out 2 min)"
        );
        assert_eq!(started.elapsed(), Duration::from_secs(5));
        assert_eq!(
            reporter.next().await.message,
            "running for 10 s (time-out 2 min)"
        );
        assert_eq!(started.elapsed(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn news_are_told_as_they_come() {
        let (_sender, preparation) = watch::channel(Preparation::Ready);
        let news = ProgressChannel::default();
        let mut reporter = Reporter::new(preparation, Duration::from_secs(120), &news);
        let finish = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            news.send_replace("3 of 5 variants finished".to_owned());
        };
        let (report, ()) = tokio::join!(reporter.next(), finish);
        assert_eq!(report.message, "3 of 5 variants finished");
        drop(news);
        let next = reporter.next().await;
        assert_eq!(next.message, "3 of 5 variants finished", "a sign of life");
        assert!(next.progress > report.progress + 4.0);
    }

    #[tokio::test(start_paused = true)]
    async fn reports_go_on_after_the_backend_is_gone() {
        let (sender, preparation) = watch::channel(Preparation::Ready);
        drop(sender);
        let mut reporter = Reporter::new(
            preparation,
            Duration::from_secs(9),
            &ProgressChannel::default(),
        );
        assert_eq!(
            reporter.next().await.message,
            "running for 5 s (time-out 9 s)"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn progress_always_grows() {
        let (sender, preparation) = watch::channel(working("a"));
        let mut reporter = Reporter::new(
            preparation,
            Duration::from_secs(9),
            &ProgressChannel::default(),
        );
        let mut last = -1.0;
        for number in 0..20 {
            sender.send(working(&number.to_string())).unwrap();
            let report = reporter.next().await;
            assert!(report.progress > last);
            last = report.progress;
        }
    }
}
