//! What hostile input costs: memory and processor time of the server, and the delay of a neighbour.
//!
//! ```text
//! cargo bench --bench hostile                 all inputs
//! cargo bench --bench hostile -- frame png    the inputs whose names contain one of these words
//! ```
//!
//! Each input meets a server of its own (`service`), on which a neighbour, another caller, runs
//! `print(1)` again and again: first alone, then while the input (`inputs`) is sent. Printed are
//! the peak of the server's memory over its memory when idle, what of that is left afterwards, its
//! processor time, and the neighbour's slowest cell beside the slowest one before.
//!
//! Nothing is asserted: a missed target is printed as such. Machines differ, and a busy one misses
//! everything.

mod inputs;
mod service;

#[path = "../sessions/http_client.rs"]
#[allow(dead_code)]
mod http_client;
#[path = "../sessions/server.rs"]
#[allow(dead_code)]
mod server;
#[path = "../sessions/serving.rs"]
mod serving;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

use self::http_client::HttpClient;
use self::inputs::{INPUTS, Input};
use self::server::printed;
use self::service::{Key, Service};

/// Memory over idle that an input may cost.
const MEMORY_TARGET: u64 = 150_000_000;
/// What a neighbour's slowest cell may take: twice as long as undisturbed, and this.
const DELAY_TARGET: Duration = Duration::from_millis(50);

/// Cells of the neighbour before the input comes.
const CELLS_BEFORE: usize = 300;
/// How long the neighbour goes on after the input was sent.
const AFTERWARDS: Duration = Duration::from_secs(1);
/// When memory is looked at for what stays.
const SETTLED: Duration = Duration::from_secs(2);

fn main() -> anyhow::Result<()> {
    // Cargo adds a flag of its own.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    let chosen = INPUTS
        .iter()
        .filter(|input| words.is_empty() || words.iter().any(|word| input.name.contains(word)));
    println!(
        "input | memory over idle: peak, left | processor | slowest cell of a neighbour: alone, \
         beside it"
    );
    for input in chosen {
        match measure(input) {
            Ok(cost) => cost.print(input.name),
            Err(error) => println!("  - {}: not measured: {error:#}", input.name),
        }
    }
    Ok(())
}

/// What an input cost.
struct Cost {
    peak: u64,
    left: u64,
    processor: Duration,
    alone: Duration,
    beside: Duration,
    cells: usize,
}

impl Cost {
    fn print(&self, name: &str) {
        let Cost {
            peak,
            left,
            processor,
            alone,
            beside,
            cells,
        } = self;
        let met = *peak <= MEMORY_TARGET && *beside <= 2 * *alone + DELAY_TARGET;
        println!(
            "  {} {name}: {:.0} MB, {:.0} MB | {:.2} s | {:.0} ms, {:.0} ms ({cells} cells)",
            if met { "✓" } else { "✗ MISSED" },
            *peak as f64 / 1e6,
            *left as f64 / 1e6,
            processor.as_secs_f64(),
            alone.as_secs_f64() * 1e3,
            beside.as_secs_f64() * 1e3,
        );
    }
}

fn measure(input: &Input) -> anyhow::Result<Cost> {
    let service = Arc::new(Service::start(input.settings)?);
    let runtime = runtime()?;
    let mut neighbour = runtime.block_on(Neighbour::connect(&service))?;
    // The first cells of a session are slower: its memory is not its own yet.
    runtime.block_on(neighbour.cells(10))?;
    let alone = runtime.block_on(neighbour.cells(CELLS_BEFORE))?;
    let (idle, before) = (service.memory()?, service.processor()?);
    service.forget_peak()?;
    let sent = Arc::new(AtomicBool::new(false));
    let sender = std::thread::spawn({
        let (service, sent, send) = (service.clone(), sent.clone(), input.send);
        move || {
            let result = runtime_of_its_own(|| send(service));
            sent.store(true, Ordering::Relaxed);
            result
        }
    });
    let (mut beside, mut cells, mut end) = (Duration::ZERO, 0, None);
    while end.is_none_or(|end| Instant::now() < end) {
        beside = beside.max(runtime.block_on(neighbour.cell())?);
        cells += 1;
        if end.is_none() && sent.load(Ordering::Relaxed) {
            end = Some(Instant::now() + AFTERWARDS);
        }
    }
    sender
        .join()
        .map_err(|_| anyhow::anyhow!("the sender of the input failed"))??;
    let (peak, processor) = (service.peak()?, service.processor()?.saturating_sub(before));
    std::thread::sleep(SETTLED);
    let over_idle = |memory: u64| memory.saturating_sub(idle);
    Ok(Cost {
        peak: over_idle(peak),
        left: over_idle(service.memory()?),
        processor,
        alone,
        beside,
        cells,
    })
}

fn runtime() -> anyhow::Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

fn runtime_of_its_own<F: Future<Output = anyhow::Result<()>>>(
    send: impl FnOnce() -> F,
) -> anyhow::Result<()> {
    runtime()?.block_on(send())
}

/// Another caller, who wants nothing but short cells.
struct Neighbour(HttpClient);

impl Neighbour {
    async fn connect(service: &Service) -> anyhow::Result<Neighbour> {
        Ok(Neighbour(
            HttpClient::connect(service.address, Some(service.key(Key::Neighbour))).await?,
        ))
    }

    async fn cell(&mut self) -> anyhow::Result<Duration> {
        let arguments = json!({"code": "print(1)", "session_id": "neighbour"});
        let (result, elapsed) = self
            .0
            .call("execute_ipython_cell", &arguments)
            .await
            .context("the neighbour was not served")?;
        ensure!(
            printed(&result) == Some("1"),
            "the neighbour got a wrong answer: {result}"
        );
        Ok(elapsed)
    }

    /// Runs so many cells and returns the slowest.
    async fn cells(&mut self, count: usize) -> anyhow::Result<Duration> {
        let mut slowest = Duration::ZERO;
        for _ in 0..count {
            slowest = slowest.max(self.cell().await?);
        }
        Ok(slowest)
    }
}
