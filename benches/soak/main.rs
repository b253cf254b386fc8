//! A long run: callers take random steps in their sessions, and every answer is compared with a
//! model of the session.
//!
//! ```text
//! cargo bench --bench soak -- 30m                     half an hour
//! cargo bench --bench soak -- 90s --seed 7            the same steps as another run with this seed
//! cargo bench --bench soak -- 2h --workers 6 --sessions 30
//! CELLBLOCK_BINARY=… cargo bench --bench soak -- 10m  another build of the program
//! ```
//!
//! `steps` has the workers, `model` says what a session must be, `measure` looks at the server's
//! processes from outside. The exit status is 1 after a wrong answer, a call without an answer, a
//! broken audit chain, something that is left at the end, or memory that grows by more than 2 MiB
//! an hour in a run of at least 20 minutes.

mod client;
mod measure;
mod model;
mod random;
mod service;
mod steps;
mod tally;

#[path = "../sessions/http_client.rs"]
#[allow(dead_code)]
mod http_client;
#[path = "../sessions/server.rs"]
#[allow(dead_code)]
mod server;
#[path = "../sessions/serving.rs"]
mod serving;
#[path = "../sessions/statistics.rs"]
#[allow(dead_code)]
mod statistics;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

use self::measure::{LASTING, Look, Places, growth_per_hour};
use self::service::Service;
use self::steps::Worker;
use self::tally::Tally;

const MIB: f64 = 1024.0 * 1024.0;
const BETWEEN_LOOKS: Duration = Duration::from_secs(2);
const BETWEEN_LINES: Duration = Duration::from_secs(60);
/// What is seen before is not a part of the growth.
const WARM_UP: Duration = Duration::from_secs(120);
/// Growth of memory in an hour that is allowed, and how long must be measured to say so.
const MAX_GROWTH: f64 = 2.0 * MIB;
const MIN_MEASURED: Duration = Duration::from_secs(20 * 60);
/// How long what was closed may take to go away.
const SETTLING: Duration = Duration::from_secs(30);

struct Settings {
    duration: Duration,
    workers: usize,
    sessions: usize,
    seed: u64,
}

fn main() -> anyhow::Result<ExitCode> {
    let settings = settings()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let is_clean = runtime.block_on(soak(&settings))?;
    println!(
        "\n{}",
        if is_clean {
            "✓ clean"
        } else {
            "✗ NOT CLEAN"
        }
    );
    Ok(ExitCode::from(u8::from(!is_clean)))
}

fn settings() -> anyhow::Result<Settings> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let mut settings = Settings {
        duration: Duration::from_secs(60),
        workers: 6,
        sessions: 30,
        seed: now,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || {
            words
                .next()
                .with_context(|| format!("{word} needs a value"))
        };
        match word.as_str() {
            // Cargo adds it.
            "--bench" => {}
            "--seed" => settings.seed = value()?.parse()?,
            "--workers" => settings.workers = value()?.parse()?,
            "--sessions" => settings.sessions = value()?.parse()?,
            duration => {
                let (number, unit) = duration.split_at(duration.len() - 1);
                let seconds = match unit {
                    "s" => 1,
                    "m" => 60,
                    "h" => 3600,
                    _ => bail!("{duration} is not a duration such as 90s, 30m or 2h"),
                };
                settings.duration = Duration::from_secs(number.parse::<u64>()? * seconds);
            }
        }
    }
    ensure!(
        settings.sessions >= 2 * settings.workers,
        "every worker needs two sessions"
    );
    Ok(settings)
}

async fn soak(settings: &Settings) -> anyhow::Result<bool> {
    let Settings {
        duration,
        workers,
        sessions,
        seed,
    } = *settings;
    println!(
        "{workers} callers, {sessions} sessions, {} s, --seed {seed}",
        duration.as_secs()
    );
    let mut service = Service::start(workers)?;
    let tally = Arc::new(Tally::default());
    // The first session waits for Python and for the pool.
    worker(&service, 0, 2, seed)
        .await?
        .work(Instant::now(), &tally)
        .await?;
    let places = Places::of(service.process_id(), service.daemon()?, service.folder());
    let start = settled(&places, None).await;

    let (begun, mut running) = (Instant::now(), JoinSet::new());
    for number in 0..workers {
        // A remainder goes to the first ones.
        let own = sessions / workers + usize::from(number < sessions % workers);
        let worker = worker(&service, number, own, seed.wrapping_add(number as u64)).await?;
        let tally = tally.clone();
        running.spawn(async move { worker.work(begun + duration, &tally).await });
    }
    let (mut looks, mut line) = (Vec::new(), BETWEEN_LINES);
    while !running.is_empty() {
        tokio::select! {
            Some(done) = running.join_next() => done??,
            () = tokio::time::sleep(BETWEEN_LOOKS) => {
                if begun.elapsed() < duration {
                    looks.push((begun.elapsed(), places.look()));
                }
            }
        }
        if begun.elapsed() >= line {
            line += BETWEEN_LINES;
            let (wrong_answers, no_answers) = tally.failures();
            let memory = looks
                .last()
                .map_or(0.0, |(_, look)| look.memory() as f64 / MIB);
            println!(
                "{} s: {} steps, {wrong_answers} wrong answers, {no_answers} without an answer, \
                 {memory:.1} MiB",
                begun.elapsed().as_secs(),
                tally.steps(),
            );
        }
    }
    tally.print();
    let grows = print_growth(&looks, duration);
    let remains = print_end(&start, &settled(&places, Some(&start)).await);
    let noted = places.processes();
    service.end()?;
    let is_left = print_left(&places, &service, &noted).await;
    let chain = service.verify_audit();
    match &chain {
        Ok(text) => println!("audit log: {text}"),
        Err(error) => println!("✗ audit log: {error:#}"),
    }
    Ok(tally.is_clean() && !grows && !remains && !is_left && chain.is_ok())
}

async fn worker(
    service: &Service,
    number: usize,
    sessions: usize,
    seed: u64,
) -> anyhow::Result<Worker> {
    let key = service.keys[number].clone();
    Worker::connect(
        format!("caller c{number}"),
        sessions,
        service.address,
        key,
        seed,
    )
    .await
}

/// Waits until nothing changes any more or, with a look from before, until there is no more than
/// there was.
async fn settled(places: &Places, before: Option<&Look>) -> Look {
    let (deadline, mut last, mut quiet) = (Instant::now() + SETTLING, places.look(), 0);
    while Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let look = places.look();
        match before {
            Some(before) if exceeds(before, &look).is_empty() => return look,
            Some(_) => {}
            None => {
                quiet = if look.counts() == last.counts() {
                    quiet + 1
                } else {
                    0
                };
                if quiet == 6 {
                    return look;
                }
            }
        }
        last = look;
    }
    last
}

/// What there is more of than before. Threads of a pool come and go.
fn exceeds(before: &Look, after: &Look) -> Vec<&'static str> {
    let pairs = before.counts().into_iter().zip(after.counts());
    pairs
        .filter(|((name, before), (_, after))| *name != "threads" && after > before)
        .map(|((name, _), _)| name)
        .collect()
}

/// Prints growth per hour; tells whether memory grows too much.
fn print_growth(looks: &[(Duration, Look)], duration: Duration) -> bool {
    let from = WARM_UP.min(duration / 2);
    let looks: Vec<_> = looks.iter().filter(|(at, _)| *at >= from).collect();
    let growth = |of: &dyn Fn(&Look) -> u64| {
        let values: Vec<(f64, f64)> = looks
            .iter()
            .map(|(at, look)| (at.as_secs_f64(), of(look) as f64))
            .collect();
        growth_per_hour(&values)
    };
    let measured = duration.saturating_sub(from);
    println!(
        "\ngrowth per hour, over {} s: memory, descriptors, threads",
        measured.as_secs()
    );
    for (place, name) in LASTING.iter().enumerate() {
        let now = looks.last().map_or(0, |(_, look)| look.held[place].memory) as f64 / MIB;
        println!(
            "    {name:<10}{:+.2} MiB (of {now:.1}), {:+.1}, {:+.1}",
            growth(&|look| look.held[place].memory) / MIB,
            growth(&|look| look.held[place].descriptors),
            growth(&|look| look.held[place].threads),
        );
    }
    for place in 0..3 {
        println!(
            "    {:<16}{:+.1}",
            Look::default().counts()[place].0,
            growth(&|look| look.counts()[place].1)
        );
    }
    let memory = growth(&Look::memory);
    let grows = measured >= MIN_MEASURED && memory > MAX_GROWTH;
    println!(
        "{} memory in all: {:+.2} MiB/h",
        if grows { "✗" } else { "✓" },
        memory / MIB
    );
    grows
}

/// Compares what is left after all sessions were closed with the start.
fn print_end(start: &Look, end: &Look) -> bool {
    println!("\nall sessions closed: now, at the start");
    for ((name, before), (_, after)) in start.counts().into_iter().zip(end.counts()) {
        println!("    {name:<16}{after}, {before}");
    }
    println!(
        "    {:<16}{:.1} MiB, {:.1} MiB",
        "memory",
        end.memory() as f64 / MIB,
        start.memory() as f64 / MIB
    );
    let more = exceeds(start, end);
    if !more.is_empty() {
        println!("✗ more than at the start: {}", more.join(", "));
    }
    !more.is_empty()
}

/// Prints what the server has left behind; it ends its daemon by itself.
async fn print_left(places: &Places, service: &Service, noted: &BTreeMap<u32, String>) -> bool {
    let deadline = Instant::now() + SETTLING;
    loop {
        let alive = |pid: &u32, name: &String| {
            let found = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            found.is_ok_and(|found| found.trim() == name)
        };
        let processes: Vec<_> = noted
            .iter()
            .filter(|(pid, name)| alive(pid, name))
            .collect();
        let (groups, files) = (places.groups_left(), service.files());
        if processes.is_empty() && groups.is_empty() && files.is_empty() {
            println!("the server has ended: nothing is left");
            return false;
        }
        if Instant::now() >= deadline {
            println!("✗ the server has ended: left are {processes:?}, {groups:?}, {files:?}");
            return true;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
