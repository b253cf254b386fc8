//! Progress of long work: a bar or a spinner on a terminal, a few plain lines elsewhere. Always on
//! standard error.
//!
//! All long work reports its progress as `Preparation`, so all of it looks the same.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::sandbox::Preparation;

/// Shows progress until the work is ready, has failed, or was dropped. Work that is already done
/// shows nothing.
pub(super) async fn show(work: watch::Receiver<Preparation>) {
    if std::io::stderr().is_terminal() {
        show_bar(work, ProgressDrawTarget::stderr()).await;
    } else {
        show_lines(work, &mut std::io::stderr()).await;
    }
}

async fn show_bar(mut work: watch::Receiver<Preparation>, target: ProgressDrawTarget) {
    let bar = ProgressBar::with_draw_target(None, target);
    let spinner = ProgressStyle::with_template("{spinner} {msg}").expect("the template is sound");
    let counted = ProgressStyle::with_template("{spinner} {msg} [{bar:30}] {pos}/{len}")
        .expect("the template is sound");
    while let Preparation::Working { step, done, total } = current(&mut work) {
        match total {
            Some(total) => {
                bar.set_style(counted.clone());
                bar.set_length(total);
                bar.set_position(done);
            }
            None => bar.set_style(spinner.clone()),
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        bar.set_message(step);
        if work.changed().await.is_err() {
            break;
        }
    }
    bar.finish_and_clear();
}

/// Fast work must not flood a log.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

async fn show_lines(mut work: watch::Receiver<Preparation>, output: &mut (dyn Write + Send)) {
    // Work that takes less than a second prints nothing.
    let mut last: Option<(Instant, String)> = Some((Instant::now(), String::new()));
    while let Preparation::Working { step, done, total } = current(&mut work) {
        let line = match total {
            Some(total) => format!("cellblock: {step} ({done} of {total})"),
            None => format!("cellblock: {step}"),
        };
        let next = last.as_ref().map(|(when, _)| *when + BETWEEN_LINES);
        let changed = if last.as_ref().is_some_and(|(_, text)| *text == line) {
            work.changed().await
        } else if let Some(next) = next.filter(|next| *next > Instant::now()) {
            // The state at the end of the interval is printed; intermediate states are skipped.
            match tokio::time::timeout_at(next, work.changed()).await {
                Ok(changed) => changed,
                Err(_) => Ok(()),
            }
        } else {
            // A failed write to the log must not stop the work.
            let _ = writeln!(output, "{line}");
            last = Some((Instant::now(), line));
            work.changed().await
        };
        if changed.is_err() {
            break;
        }
    }
}

fn current(work: &mut watch::Receiver<Preparation>) -> Preparation {
    work.borrow_and_update().clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn working(step: &str, done: u64, total: Option<u64>) -> Preparation {
        Preparation::Working {
            step: step.to_owned(),
            done,
            total,
        }
    }

    /// Sends each state after its pause, on a paused clock, and returns the written lines.
    async fn lines(states: Vec<(u64, Preparation)>) -> Vec<String> {
        let mut states = states.into_iter();
        let (sender, receiver) = watch::channel(states.next().expect("there is a first state").1);
        let mut output = Vec::new();
        let sending = async move {
            for (pause, state) in states {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                sender.send_replace(state);
            }
        };
        tokio::join!(sending, show_lines(receiver, &mut output));
        String::from_utf8(output)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_is_done_shows_nothing() {
        assert_eq!(
            lines(vec![(0, Preparation::Ready)]).await,
            Vec::<String>::new()
        );
    }

    #[tokio::test(start_paused = true)]
    async fn at_most_one_line_is_written_in_a_second() {
        let states = vec![
            (0, working("looking", 0, None)),
            (100, working("downloading", 1, Some(9))),
            (100, working("downloading", 2, Some(9))),
            (2000, working("checking", 0, None)),
            (2000, Preparation::Ready),
        ];
        let expected = ["cellblock: downloading (2 of 9)", "cellblock: checking"];
        assert_eq!(lines(states).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn showing_ends_when_the_work_fails_or_is_given_up() {
        let failed = Preparation::Failed {
            why: "no".to_owned(),
        };
        assert_eq!(
            lines(vec![(0, working("a", 0, None)), (1500, failed.clone())])
                .await
                .len(),
            1
        );
        assert_eq!(
            lines(vec![(0, working("a", 0, None)), (10, failed)])
                .await
                .len(),
            0
        );
        assert_eq!(lines(vec![(0, working("a", 0, None))]).await.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_bar_ends_with_the_work_too() {
        let (sender, receiver) = watch::channel(working("a", 0, Some(2)));
        let work = async move {
            tokio::task::yield_now().await;
            sender.send_replace(working("b", 1, None));
            tokio::task::yield_now().await;
            sender.send_replace(Preparation::Ready);
        };
        tokio::join!(work, show_bar(receiver, ProgressDrawTarget::hidden()));
    }
}
