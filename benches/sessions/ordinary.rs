//! What ordinary programs pay for the wall: the same work inside and outside, in turn.

use std::collections::BTreeMap;

use anyhow::Context;

use crate::server::{Server, cellblock, printed};
use crate::{Peers, target};

const ROUNDS: usize = 15;
/// Each task once; the names are those of its functions.
const PROGRAM: &str = include_str!("ordinary.py");
/// Tasks that make few system calls.
const COMPUTATION: [&str; 3] = ["loop", "sort", "matrices"];
const MAX_FOR_COMPUTATION: f64 = 1.03;
const MOST: f64 = 1.15;

/// Seconds and seconds of processor time, by task.
type Figures = BTreeMap<String, [f64; 2]>;

pub(crate) fn speed_of_ordinary_code(peers: &Peers) -> anyhow::Result<()> {
    println!("\nordinary code inside, over the same outside (medians of {ROUNDS} rounds in turn)");
    let (mut server, _) = Server::start(cellblock("mcp"))?;
    let inside_once = |server: &mut Server| -> anyhow::Result<Figures> {
        let (result, _) = server.execute("a", PROGRAM)?;
        Ok(serde_json::from_str(
            printed(&result).context("the session printed nothing")?,
        )?)
    };
    inside_once(&mut server)?;
    let (mut inside, mut outside) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        inside.push(inside_once(&mut server)?);
        outside.push(serde_json::from_str::<Figures>(
            &peers.plain.output(PROGRAM)?,
        )?);
    }
    for task in inside[0].keys() {
        let [wall, used] =
            [0, 1].map(|kind| [&inside, &outside].map(|all| median(all, task, kind)));
        let most = if COMPUTATION.contains(&task.as_str()) {
            MAX_FOR_COMPUTATION
        } else {
            MOST
        };
        let ratio = used[0] / used[1];
        let figures = format!(
            "{ratio:.2} × the processor time ({:.1} to {:.1} ms), {:.2} × the time",
            used[0] * 1e3,
            used[1] * 1e3,
            wall[0] / wall[1]
        );
        target(task, figures, &format!("≤ {most} ×"), ratio <= most);
    }
    Ok(())
}

fn median(all: &[Figures], task: &str, kind: usize) -> f64 {
    let mut values: Vec<f64> = all.iter().map(|figures| figures[task][kind]).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
