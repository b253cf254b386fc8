//! The history of a session: which cells ran, and which copy of the session precedes which cell.
//!
//! The number of copies is bounded; the oldest are dropped first. A cell whose copy is gone, or was
//! never made, cannot be undone alone, but together with an older one that has a copy. Nothing is
//! performed here: methods that change the history return the copies that are no longer needed.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::CheckpointInfo;
use crate::sandbox::CheckpointId;

/// Cells that are remembered. Cells that change nothing need no copy of their own, so there may be
/// more cells than copies.
const MAX_CELLS: usize = 100;
/// Limit in characters for a cell's first line.
const MAX_LINE_LENGTH: usize = 80;

/// A copy of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeptState {
    pub(super) checkpoint: CheckpointId,
    pub(super) made: Instant,
    /// What the copy lacks, as claimed by the runner when it was made.
    pub(super) lost: Vec<String>,
    /// What the session already lacked at that time, because a fork had lost it.
    pub(super) lacked: Vec<String>,
    /// Whether forks can be made from it.
    pub(super) whole: bool,
    /// Its package folders.
    pub(super) packages: Vec<String>,
}

impl KeptState {
    /// Creates a copy that was made just now and lacks nothing.
    pub(super) fn new(checkpoint: CheckpointId) -> KeptState {
        KeptState {
            checkpoint,
            made: Instant::now(),
            lost: Vec::new(),
            lacked: Vec::new(),
            whole: false,
            packages: Vec::new(),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct History {
    /// Oldest first.
    copies: VecDeque<KeptState>,
    /// Oldest first.
    cells: VecDeque<Cell>,
    /// The copy of the current state, if there is one.
    present: Option<CheckpointId>,
}

#[derive(Debug)]
struct Cell {
    line: String,
    before: Option<CheckpointId>,
}

impl History {
    /// Adds a copy of the current state. Returns the copies to drop so that at most `most` are kept
    /// beside it.
    pub(super) fn copied(&mut self, copy: KeptState, most: usize) -> Vec<CheckpointId> {
        self.present = Some(copy.checkpoint);
        self.copies.push_back(copy);
        self.forget_beyond(most + 1)
    }

    /// Adds a starting cell. The copy of the current state can be restored from now on, and at most
    /// `most` such copies are kept.
    pub(super) fn began(&mut self, code: &str, most: usize) -> Vec<CheckpointId> {
        self.cells.push_back(Cell {
            line: first_line(code),
            before: self.present,
        });
        if self.cells.len() > MAX_CELLS {
            self.cells.pop_front();
        }
        self.forget_beyond(most)
    }

    /// Records that the state has changed since the last copy.
    pub(super) fn changed(&mut self) {
        self.present = None;
    }

    /// Returns the copy that precedes the last `cells` cells.
    pub(super) fn before(&self, cells: u32) -> Option<&KeptState> {
        let place = self.cells.len().checked_sub(usize::try_from(cells).ok()?)?;
        let checkpoint = self.cells.get(place)?.before?;
        self.copies
            .iter()
            .find(|copy| copy.checkpoint == checkpoint)
    }

    /// Returns the copy of the current state, if forks can be made from it.
    pub(super) fn whole(&self) -> Option<&KeptState> {
        self.copies
            .iter()
            .find(|copy| Some(copy.checkpoint) == self.present && copy.whole)
    }

    /// Goes back to the state before the last `cells` cells. Returns the copies that are no longer
    /// needed.
    pub(super) fn undone(&mut self, cells: u32) -> Vec<CheckpointId> {
        self.present = self.before(cells).map(|copy| copy.checkpoint);
        let left = self.cells.len().saturating_sub(cells as usize);
        self.cells.truncate(left);
        self.forget_needless()
    }

    /// Drops the oldest copy, unless it is the only one.
    pub(super) fn give_up_oldest(&mut self) -> Option<CheckpointId> {
        if self.copies.len() > 1 {
            self.forget_oldest()
        } else {
            None
        }
    }

    /// Drops the copies that no longer exist. Returns their number.
    pub(super) fn retain(&mut self, is_there: impl Fn(CheckpointId) -> bool) -> usize {
        let before = self.copies.len();
        self.copies.retain(|copy| is_there(copy.checkpoint));
        self.drop_references();
        before - self.copies.len()
    }

    /// Clears the history and returns its copies.
    pub(super) fn clear(&mut self) -> Vec<CheckpointId> {
        let copies = self.copies.iter().map(|copy| copy.checkpoint).collect();
        *self = History::default();
        copies
    }

    /// Returns whether the current state has a copy.
    #[cfg(test)]
    fn has_present(&self) -> bool {
        self.present.is_some()
    }

    /// Returns whether any cell is remembered since the session started or was reset.
    pub(super) fn has_cells(&self) -> bool {
        !self.cells.is_empty()
    }

    /// Returns the states that can be restored, the most recent first.
    pub(super) fn undoable(&self) -> Vec<Undoable> {
        let cells = self.cells.iter().rev().zip(1..);
        cells
            .filter_map(|(cell, cells_back)| {
                let made = self.before(cells_back)?.made;
                Some(Undoable {
                    cells_back,
                    before: cell.line.clone(),
                    made,
                })
            })
            .collect()
    }

    fn forget_beyond(&mut self, most: usize) -> Vec<CheckpointId> {
        let mut forgotten = self.forget_needless();
        while self.copies.len() > most.max(1) {
            forgotten.extend(self.forget_oldest());
        }
        forgotten
    }

    fn forget_oldest(&mut self) -> Option<CheckpointId> {
        let oldest = self.copies.pop_front()?;
        self.drop_references();
        Some(oldest.checkpoint)
    }

    /// Removes references to dropped copies from the cells and the current state, and removes cells
    /// that can no longer be undone.
    fn drop_references(&mut self) {
        let is_kept = |checkpoint: &CheckpointId| {
            self.copies
                .iter()
                .any(|copy| copy.checkpoint == *checkpoint)
        };
        self.present = self.present.filter(is_kept);
        for cell in &mut self.cells {
            cell.before = cell.before.filter(is_kept);
        }
        while self.cells.front().is_some_and(|cell| cell.before.is_none()) && self.cells.len() > 1 {
            self.cells.pop_front();
        }
    }

    /// Drops copies that neither precede a cell nor are the current state.
    fn forget_needless(&mut self) -> Vec<CheckpointId> {
        let mut forgotten = Vec::new();
        let (cells, present) = (&self.cells, self.present);
        self.copies.retain(|copy| {
            let checkpoint = Some(copy.checkpoint);
            let needed =
                present == checkpoint || cells.iter().any(|cell| cell.before == checkpoint);
            if !needed {
                forgotten.push(copy.checkpoint);
            }
            needed
        });
        forgotten
    }
}

/// A state that can be restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Undoable {
    pub(super) cells_back: u32,
    pub(super) before: String,
    pub(super) made: Instant,
}

impl Undoable {
    pub(super) fn info(self, now: Instant) -> CheckpointInfo {
        CheckpointInfo {
            cells_back: self.cells_back,
            before: self.before,
            age: now - self.made,
        }
    }
}

/// Returns the first non-blank line of a cell, shortened.
pub(super) fn first_line(code: &str) -> String {
    let line = code
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty())
        .unwrap_or_default();
    let clean = line.chars().map(|character| {
        if character.is_control() {
            ' '
        } else {
            character
        }
    });
    if line.chars().count() <= MAX_LINE_LENGTH {
        return clean.collect();
    }
    clean.take(MAX_LINE_LENGTH - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a history from steps: `copy N`, `cell X`, `changed`. Returns it with all copies that
    /// were dropped on the way.
    fn history(most: usize, steps: &[&str]) -> (History, Vec<u32>) {
        let mut history = History::default();
        let mut forgotten = Vec::new();
        for step in steps {
            let gone = match step.split_once(' ') {
                Some(("copy", number)) => {
                    let checkpoint = CheckpointId(number.parse().unwrap());
                    history.copied(KeptState::new(checkpoint), most)
                }
                Some(("cell", code)) => history.began(code, most),
                _ => {
                    history.changed();
                    vec![]
                }
            };
            forgotten.extend(gone.into_iter().map(|checkpoint| checkpoint.0));
        }
        (history, forgotten)
    }

    fn shown(history: &History) -> Vec<(u32, String, u32)> {
        let checkpoint = |cells: u32| history.before(cells).unwrap().checkpoint.0;
        history
            .undoable()
            .into_iter()
            .map(|entry| (entry.cells_back, entry.before, checkpoint(entry.cells_back)))
            .collect()
    }

    fn entry(cells_back: u32, before: &str, checkpoint: u32) -> (u32, String, u32) {
        (cells_back, before.to_owned(), checkpoint)
    }

    #[test]
    fn each_cell_can_be_undone_to_the_copy_before_it() {
        let (history, forgotten) = history(
            10,
            &["copy 1", "cell a", "changed", "copy 2", "cell b", "changed"],
        );
        assert_eq!(shown(&history), [entry(1, "b", 2), entry(2, "a", 1)]);
        assert_eq!(
            (forgotten, history.before(3), history.has_present()),
            (vec![], None, false)
        );
    }

    #[test]
    fn cells_that_change_nothing_share_a_copy_and_count_each() {
        let (history, _) = history(10, &["copy 1", "cell a", "cell b", "changed", "copy 2"]);
        assert_eq!(shown(&history), [entry(1, "b", 1), entry(2, "a", 1)]);
    }

    #[test]
    fn the_oldest_copies_go_first_with_their_cells() {
        let steps = [
            "copy 1", "cell a", "changed", "copy 2", "cell b", "changed", "copy 3", "cell c",
            "changed",
        ];
        let (history, forgotten) = history(2, &steps);
        assert_eq!(forgotten, [1]);
        assert_eq!(shown(&history), [entry(1, "c", 3), entry(2, "b", 2)]);
    }

    #[test]
    fn a_copy_that_precedes_no_cell_is_replaced_by_the_next() {
        let (history, forgotten) = history(10, &["copy 1", "changed", "copy 2", "cell a"]);
        assert_eq!(
            (shown(&history), forgotten),
            (vec![entry(1, "a", 2)], vec![1])
        );
    }

    #[test]
    fn a_cell_without_a_copy_can_only_be_undone_with_an_older_one() {
        let (history, _) = history(
            10,
            &[
                "copy 1", "cell a", "changed", "cell b", "changed", "copy 3", "cell c",
            ],
        );
        assert_eq!(shown(&history), [entry(1, "c", 3), entry(3, "a", 1)]);
        assert_eq!(history.before(2), None);
    }

    #[test]
    fn undoing_step_by_step_is_the_same_as_undoing_at_once() {
        let steps = [
            "copy 1", "cell a", "changed", "copy 2", "cell b", "cell c", "changed", "copy 3",
            "cell d",
        ];
        let (mut once, _) = history(10, &steps);
        let (mut stepwise, _) = history(10, &steps);
        let mut forgotten = (0..3).flat_map(|_| stepwise.undone(1)).collect::<Vec<_>>();
        let mut forgotten_at_once = once.undone(3);
        forgotten.sort();
        forgotten_at_once.sort();
        assert_eq!(forgotten, forgotten_at_once);
        assert_eq!(
            (shown(&once), shown(&once)),
            (vec![entry(1, "a", 1)], shown(&stepwise))
        );
        assert!(
            once.has_present(),
            "the copy that was restored is the present"
        );
    }

    #[test]
    fn copies_that_the_kernel_took_are_forgotten() {
        let (mut history, _) = history(
            10,
            &[
                "copy 1", "cell a", "changed", "copy 2", "cell b", "changed", "copy 3",
            ],
        );
        assert_eq!(history.retain(|checkpoint| checkpoint.0 == 2), 2);
        assert_eq!(
            (shown(&history), history.has_present()),
            (vec![entry(1, "b", 2)], false)
        );
        assert_eq!(history.give_up_oldest(), None, "the last one stays");
    }

    #[test]
    fn many_cells_that_change_nothing_are_remembered_in_a_bounded_number() {
        let steps = ["copy 1", "cell a", "changed", "copy 2"];
        let (mut history, _) = history(10, &steps);
        let forgotten = (0..MAX_CELLS)
            .flat_map(|_| history.began("b", 10))
            .collect::<Vec<_>>();
        assert_eq!(
            (history.undoable().len(), forgotten),
            (MAX_CELLS, vec![CheckpointId(1)])
        );
    }

    #[test]
    fn a_cell_is_shown_by_its_first_line() {
        assert_eq!(first_line("\n\n  import numpy\nx = 1"), "import numpy");
        assert_eq!(first_line("a\tb"), "a b");
        assert_eq!(first_line(""), "");
        let long = first_line(&"ä".repeat(100));
        assert!(long.chars().count() == 80 && long.ends_with('…'));
    }
}
