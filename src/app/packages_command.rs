//! `cellblock packages …`: the packages installed into sessions, from the command line.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::cli::PackagesCommand;
use super::packages::store_folder;
use crate::config::Settings;
use crate::config::quantity::format_size;
use crate::packages::{Sharing, Store, Tree, TreeName, TreeRecord};

/// Executes one command and returns its output.
pub(super) fn execute(command: &PackagesCommand, settings: &Settings) -> anyhow::Result<String> {
    let folder = store_folder(settings);
    if !folder.is_dir() {
        let is_json = matches!(command, PackagesCommand::List { json: true });
        return Ok(if is_json {
            "[]\n"
        } else {
            "no packages were installed yet\n"
        }
        .to_owned());
    }
    let store = Store::open(&folder)?;
    match command {
        PackagesCommand::List { json } => list(&store, settings, *json),
        PackagesCommand::Clean => {
            let room = store.clean()?;
            let kept = if room.left > 0 {
                format!("; {} are in use", format_size(room.left))
            } else {
                String::new()
            };
            Ok(format!(
                "removed {}, {} freed{kept}\n",
                counted(room.removed),
                format_size(room.freed)
            ))
        }
    }
}

/// Returns the number and size of the packages that no session uses, if there are any.
pub(super) fn unused(settings: &Settings) -> anyhow::Result<Option<String>> {
    let folder = store_folder(settings);
    if !folder.is_dir() {
        return Ok(None);
    }
    let store = Store::open(&folder)?;
    let in_use = store.in_use()?;
    let unused: Vec<Tree> = store
        .list()?
        .into_iter()
        .filter(|tree| !in_use.contains(&tree.name))
        .collect();
    Ok((!unused.is_empty()).then(|| {
        format!(
            "{} ({})",
            counted(unused.len()),
            format_size(bytes(&unused))
        )
    }))
}

/// Returns the state of the store in one or two lines, for `doctor`.
pub(super) fn summary(settings: &Settings) -> String {
    let folder = store_folder(settings);
    if !folder.is_dir() {
        return "none yet".to_owned();
    }
    let looked = Store::open(&folder).and_then(|store| Ok((store.list()?, store)));
    let (trees, store) = match looked {
        Ok(looked) => looked,
        Err(error) => return format!("the store cannot be used: {:#}", anyhow::Error::new(error)),
    };
    let damaged: Vec<String> = trees
        .iter()
        .filter(|tree| store.check(tree).is_err())
        .map(named)
        .collect();
    let mut text = format!(
        "{} in the store, {}",
        counted(trees.len()),
        format_size(bytes(&trees))
    );
    if !damaged.is_empty() {
        let list = damaged.join(", ");
        text.push_str(&format!(
            "\n  changed on disk: {list}\n  cure: none needed; the next installation of each \
             fetches it anew"
        ));
    }
    text
}

fn list(store: &Store, settings: &Settings, is_json: bool) -> anyhow::Result<String> {
    let (trees, in_use) = (store.list()?, store.in_use()?);
    if is_json {
        let all: Vec<Value> = trees
            .iter()
            .map(|tree| as_json(store, tree, &in_use))
            .collect();
        return Ok(serde_json::to_string_pretty(&all)? + "\n");
    }
    let mut text = String::new();
    for tree in &trees {
        let marks = [
            (in_use.contains(&tree.name), "in use"),
            (tree.record.sharing == Sharing::Private, "of one session"),
        ];
        let marks: Vec<&str> = marks
            .iter()
            .filter(|(holds, _)| *holds)
            .map(|(_, mark)| *mark)
            .collect();
        let used = store
            .last_use(&tree.name)
            .map_or_else(|| "?".to_owned(), ago);
        writeln!(
            text,
            "{:<40} {:>10}  used {used:<14} {}",
            named(tree),
            format_size(tree.record.bytes),
            marks.join(", ")
        )?;
    }
    let (size, limit) = (
        format_size(bytes(&trees)),
        format_size(settings.packages.store_size),
    );
    writeln!(text, "{}, {size} of {limit}", counted(trees.len()))?;
    Ok(text)
}

fn as_json(store: &Store, tree: &Tree, in_use: &BTreeSet<TreeName>) -> Value {
    let TreeRecord {
        package,
        version,
        files,
        bytes,
        sharing,
        created,
        ..
    } = &tree.record;
    let last_use = store
        .last_use(&tree.name)
        .and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    json!({
        "package": package, "version": version, "tree": tree.name.as_str(), "files": files,
        "bytes": bytes,
        "sharing": sharing, "created": created, "last_use": last_use.map(|since| since.as_secs()),
        "in_use": in_use.contains(&tree.name),
    })
}

fn named(tree: &Tree) -> String {
    format!("{} {}", tree.record.package, tree.record.version)
}

fn bytes(trees: &[Tree]) -> u64 {
    trees.iter().map(|tree| tree.record.bytes).sum()
}

fn counted(packages: usize) -> String {
    if packages == 1 {
        "1 package".to_owned()
    } else {
        format!("{packages} packages")
    }
}

/// Returns the age of something in the largest fitting unit.
fn ago(time: SystemTime) -> String {
    let passed = time.elapsed().unwrap_or(Duration::ZERO).as_secs();
    let units = [(86_400, "d"), (3_600, "h"), (60, "min")];
    let largest = units.iter().find(|(seconds, _)| passed >= *seconds);
    largest.map_or_else(
        || "just now".to_owned(),
        |(seconds, unit)| format!("{} {unit} ago", passed / seconds),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_the_largest_unit() {
        let before = |seconds| ago(SystemTime::now() - Duration::from_secs(seconds));
        assert_eq!(
            [5, 90, 7_300, 200_000].map(before),
            ["just now", "1 min ago", "2 h ago", "2 d ago"]
        );
        assert_eq!(
            ago(SystemTime::now() + Duration::from_secs(90)),
            "just now",
            "a clock was wrong"
        );
    }
}
