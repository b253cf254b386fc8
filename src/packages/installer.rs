//! Runs an installation: resolve, look up in the store, fetch missing wheels, build packages
//! without a wheel.
//!
//! The sandbox resolves and unpacks. The host decides which trees are shared, which replies are
//! accepted, and when a limit is exceeded. Replies of the resolver are cached for a while, as an
//! installer's own index cache would do; a cached reply can make the sandbox unnecessary.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cellblock_json::{Budget, MAX_DEPTH};
use serde::de::DeserializeOwned;

use super::answers::{
    ANSWER_FILE, CERTIFICATES_FILE, HeldBack, InstallerReply, InstallerRequest, InstallerStep,
    MAX_ANSWER_BYTES, Packed, Pin, REQUEST_FILE, Resolved, WantedPackages, checked_packages,
    stream_file,
};
use super::requirement::{Requirement, RequirementSource};
use super::store::{Sharing, Store, StoreError, Tree, TreeKey};
use super::stream::{Bounds, StreamError};
use super::{BuildSandbox, BuildSandboxes};
use super::{
    Builds, IndexSettings, InstallLimits, InstallResult, PACKAGES_INSIDE, PackageError,
    PackageVersion, Step, Tell,
};

/// The script that runs inside.
const INSTALLER: &str = include_str!("installer.py");

/// Time for which a resolver reply is cached. Indexes ask installers to cache their pages for the
/// same time.
const ANSWERS_KEPT_FOR: Duration = Duration::from_secs(600);
/// Maximum number of cached replies.
const ANSWERS_KEPT: usize = 256;

/// Allowance for the headers and the end of a stream, in addition to the bytes of its files.
const ROOM_FOR_HEADERS: u64 = 64 << 20;
/// Maximum size of a certificate file. A machine's whole collection is a fifth of this.
const MAX_CERTIFICATES_BYTES: u64 = 1 << 20;
/// Limits on a reply of the installer, in addition to its size.
const ANSWER: Budget = Budget {
    depth: MAX_DEPTH,
    memory: 16 << 20,
};

/// Maximum number of lines of installer output in an error.
const LINES_KEPT: usize = 40;
const MAX_LINE_LENGTH: usize = 1_000;

/// A session's request for packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackageRequest {
    pub requirements: Vec<Requirement>,
    /// Whether packages named in `requirements` are upgraded to the newest possible version.
    pub upgrade: bool,
    /// The session's packages: those of its environment, then those installed into it. If a package
    /// occurs twice, the last one counts.
    pub present: Vec<PackageVersion>,
}

/// Installs packages for all sessions of a server.
#[derive(Debug)]
pub struct Installer {
    store: Arc<Store>,
    index: IndexSettings,
    limits: InstallLimits,
    answers: Mutex<HashMap<Question, (Instant, Resolved)>>,
}

/// Everything that a resolver reply depends on, apart from the time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Question {
    requirements: Vec<String>,
    present: BTreeMap<String, String>,
}

/// The packages selected for a request.
struct Chosen {
    trees: Vec<Tree>,
    already: Vec<PackageVersion>,
    held_back: Vec<HeldBack>,
}

impl Installer {
    /// Creates an installer for one environment. Sessions of another environment need their own
    /// installer; they can share the store.
    pub fn new(store: Arc<Store>, index: IndexSettings, limits: InstallLimits) -> Installer {
        Installer {
            store,
            index,
            limits,
            answers: Mutex::default(),
        }
    }

    /// Returns the index settings.
    pub fn index(&self) -> &IndexSettings {
        &self.index
    }

    /// Returns the package store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Installs all requested packages, or none. Dropping the future stops everything that it
    /// started.
    pub async fn install(
        &self,
        request: &PackageRequest,
        build_sandboxes: &dyn BuildSandboxes,
        tell: Tell<'_>,
    ) -> Result<InstallResult, PackageError> {
        let time = self.limits.time;
        let installing = self.install_in_time(request, build_sandboxes, tell);
        let result = tokio::time::timeout(time, installing)
            .await
            .unwrap_or(Err(PackageError::TimedOut { time }));
        result.map_err(|error| match error {
            PackageError::Refused { words } => PackageError::Refused {
                words: shortened(&self.index.mask(&words)),
            },
            PackageError::BuildSandbox { why } => PackageError::BuildSandbox {
                why: shortened(&self.index.mask(&why)),
            },
            other => other,
        })
    }

    async fn install_in_time(
        &self,
        request: &PackageRequest,
        build_sandboxes: &dyn BuildSandboxes,
        tell: Tell<'_>,
    ) -> Result<InstallResult, PackageError> {
        let present: BTreeMap<&str, &str> = request
            .present
            .iter()
            .map(|package| (package.name.as_str(), package.version.as_str()))
            .collect();
        let is_satisfied = |requirement: &&Requirement| {
            let is_there = requirement
                .name()
                .is_some_and(|name| present.contains_key(name));
            requirement.is_plain() && is_there && !request.upgrade
        };
        let (satisfied, open): (Vec<&Requirement>, Vec<&Requirement>) =
            request.requirements.iter().partition(is_satisfied);
        let mut chosen = if open.is_empty() {
            Chosen {
                trees: Vec::new(),
                already: Vec::new(),
                held_back: Vec::new(),
            }
        } else {
            Job {
                installer: self,
                request,
                open,
                present: &present,
                build_sandboxes,
                tell,
                begun: Instant::now(),
            }
            .run()
            .await?
        };
        for name in satisfied.into_iter().filter_map(Requirement::name) {
            let package = PackageVersion::new(name, present[name]);
            if !chosen.already.contains(&package) {
                chosen.already.push(package);
            }
        }
        Ok(report(request, chosen))
    }

    fn known_answer(&self, question: &Question) -> Option<Resolved> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (when, answer) = answers.get(question)?;
        (when.elapsed() < ANSWERS_KEPT_FOR).then(|| answer.clone())
    }

    fn keep_answer(&self, question: Question, answer: Resolved) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.retain(|_, (when, _)| when.elapsed() < ANSWERS_KEPT_FOR);
        if answers.len() < ANSWERS_KEPT {
            answers.insert(question, (Instant::now(), answer));
        }
    }
}

/// One installation in progress.
struct Job<'a> {
    installer: &'a Installer,
    request: &'a PackageRequest,
    /// Requirements that the session's packages do not obviously satisfy.
    open: Vec<&'a Requirement>,
    present: &'a BTreeMap<&'a str, &'a str>,
    build_sandboxes: &'a dyn BuildSandboxes,
    tell: Tell<'a>,
    begun: Instant,
}

impl Job<'_> {
    async fn run(&self) -> Result<Chosen, PackageError> {
        if self
            .open
            .iter()
            .any(|requirement| matches!(requirement.source(), RequirementSource::Code(_)))
        {
            return self.build(None).await;
        }
        let question = self.question();
        let known = question
            .as_ref()
            .and_then(|question| self.installer.known_answer(question));
        let (resolved, mut sandbox) = match known {
            Some(known) => (known, None),
            None => {
                (self.tell)(Step::Resolving);
                let mut sandbox = self.open_build_sandbox().await?;
                match self
                    .ask(sandbox.as_mut(), InstallerStep::Resolve(self.wanted()))
                    .await?
                {
                    InstallerReply::Done::<Resolved>(answer) => {
                        let answer = answer.checked().map_err(PackageError::Unfitting)?;
                        if let Some(question) = question {
                            self.installer.keep_answer(question, answer.clone());
                        }
                        (answer, Some(sandbox))
                    }
                    InstallerReply::Failed {
                        failed,
                        no_wheel: true,
                        ..
                    } => {
                        drop(sandbox);
                        return self.build(Some(failed)).await;
                    }
                    failed => return Err(self.failure(failed)),
                }
            }
        };
        let (already, needed): (Vec<Pin>, Vec<Pin>) =
            resolved.pins.into_iter().partition(|pin| self.has(pin));
        let already = already
            .iter()
            .map(|pin| PackageVersion::new(&pin.name, pin.version.as_deref().unwrap_or_default()))
            .collect();
        let trees = self.trees_for(&needed, &resolved.tag, &mut sandbox).await?;
        Ok(Chosen {
            trees,
            already,
            held_back: resolved.held_back,
        })
    }

    /// Returns the trees of all pins, in order. Pins that are not in the store are fetched.
    async fn trees_for(
        &self,
        needed: &[Pin],
        tag: &str,
        sandbox: &mut Option<Box<dyn BuildSandbox>>,
    ) -> Result<Vec<Tree>, PackageError> {
        let keys: Vec<TreeKey> = needed.iter().map(|pin| self.key(pin, tag)).collect();
        let mut found = self.find(&keys).await?;
        let missing: Vec<usize> = (0..needed.len())
            .filter(|number| found[*number].is_none())
            .collect();
        if !missing.is_empty() {
            self.make_room().await?;
            (self.tell)(Step::Downloading {
                packages: missing.len(),
            });
            let sandbox = match sandbox {
                Some(open) => open,
                closed => closed.insert(self.open_build_sandbox().await?),
            };
            let mut left = self.installer.limits.bytes;
            let pins: Vec<Pin> = missing
                .iter()
                .map(|number| needed[*number].clone())
                .collect();
            let added = match self.fetch(sandbox.as_mut(), &pins, &mut left).await {
                // All packages together exceed the sandbox's disk; try them one at a time.
                Err(PackageError::NoRoom { .. }) if pins.len() > 1 => {
                    let mut added = Vec::new();
                    for (number, pin) in pins.iter().enumerate() {
                        (self.tell)(Step::Downloading {
                            packages: pins.len() - number,
                        });
                        added.extend(
                            self.fetch(sandbox.as_mut(), std::slice::from_ref(pin), &mut left)
                                .await?,
                        );
                    }
                    added
                }
                added => added?,
            };
            for (number, tree) in missing.into_iter().zip(added) {
                self.installer.store.remember(&keys[number], &tree)?;
                found[number] = Some(tree);
            }
        }
        Ok(found.into_iter().flatten().collect())
    }

    /// Fetches wheels and adds them to the store, in order. `left` limits their total size.
    async fn fetch(
        &self,
        sandbox: &mut dyn BuildSandbox,
        pins: &[Pin],
        left: &mut u64,
    ) -> Result<Vec<Tree>, PackageError> {
        let packed = match self.ask(sandbox, InstallerStep::Install { pins }).await? {
            InstallerReply::Done::<Vec<Packed>>(packed) => {
                checked_packages(packed).map_err(PackageError::Unfitting)?
            }
            failed => return Err(self.failure(failed)),
        };
        if !packed
            .iter()
            .map(|package| &package.name)
            .eq(pins.iter().map(|pin| &pin.name))
        {
            return Err(PackageError::Unfitting(
                "other packages came than were asked for",
            ));
        }
        self.add_all(sandbox, &packed, Sharing::Shared, left).await
    }

    /// Builds packages without a wheel in a separate sandbox. `why` is the resolver's output from
    /// its search for wheels.
    async fn build(&self, why: Option<String>) -> Result<Chosen, PackageError> {
        let because = |reason: &str| {
            let words = why
                .clone()
                .unwrap_or_else(|| "this is source code and must be built.".to_owned());
            self.refused(format!("{words}\n{reason}"))
        };
        if self.installer.limits.builds == Builds::Refused {
            return Err(because(
                "Packages are not built from source here; ask for one that has a wheel.",
            ));
        }
        if self.installer.index.has_credentials() {
            // The package's code could read the password during the build and leak it.
            return Err(because(
                "Packages are not built from source where the index needs a password.",
            ));
        }
        if !self.installer.index.proxies.is_empty() {
            // The package's code could reach every destination that the proxy reaches.
            return Err(because(
                "Packages are not built from source where the index is reached through a proxy.",
            ));
        }
        self.make_room().await?;
        (self.tell)(Step::Building);
        let mut sandbox = self.open_build_sandbox().await?;
        let packed = match self
            .ask(sandbox.as_mut(), InstallerStep::Build(self.wanted()))
            .await?
        {
            InstallerReply::Done::<Vec<Packed>>(packed) => {
                checked_packages(packed).map_err(PackageError::Unfitting)?
            }
            failed => return Err(self.failure(failed)),
        };
        let mut left = self.installer.limits.bytes;
        let trees = self
            .add_all(sandbox.as_mut(), &packed, Sharing::Private, &mut left)
            .await?;
        let named = self
            .open
            .iter()
            .filter_map(|requirement| requirement.name());
        let unchanged = named.filter(|name| packed.iter().all(|package| package.name != **name));
        let already = unchanged
            .filter_map(|name| Some(PackageVersion::new(name, self.present.get(name)?)))
            .collect();
        Ok(Chosen {
            trees,
            already,
            held_back: Vec::new(),
        })
    }

    /// Removes unused packages if the store is full.
    async fn make_room(&self) -> Result<(), PackageError> {
        let (store, limit) = (
            Arc::clone(&self.installer.store),
            self.installer.limits.store,
        );
        let room = blocking(move || store.make_room(limit)).await?;
        if room.removed > 0 {
            tracing::info!(
                removed = room.removed,
                freed = room.freed,
                "removed packages that nobody used for the longest time"
            );
        }
        Ok(())
    }

    /// Copies the streams of all packages from a build sandbox into the store. If one fails, the
    /// private trees before it are removed.
    async fn add_all(
        &self,
        sandbox: &mut dyn BuildSandbox,
        packed: &[Packed],
        sharing: Sharing,
        left: &mut u64,
    ) -> Result<Vec<Tree>, PackageError> {
        let mut trees = Vec::new();
        let limit = self.installer.limits.bytes;
        for (number, package) in packed.iter().enumerate() {
            let told = PackageVersion::new(&package.name, &package.version);
            (self.tell)(Step::Adding {
                package: told,
                done: number,
                total: packed.len(),
            });
            match self.add(sandbox, number, package, *left, sharing).await {
                Ok(tree) => {
                    *left = left.saturating_sub(tree.record.bytes);
                    trees.push(tree);
                }
                Err(error) => {
                    for tree in trees
                        .iter()
                        .filter(|tree| tree.record.sharing == Sharing::Private)
                    {
                        let _ = self.installer.store.remove(&tree.name);
                    }
                    return Err(match error {
                        PackageError::TooLarge { .. }
                        | PackageError::Store(StoreError::Stream(StreamError::TooLarge(_))) => {
                            PackageError::TooLarge { limit }
                        }
                        other => other,
                    });
                }
            }
        }
        Ok(trees)
    }

    async fn add(
        &self,
        sandbox: &mut dyn BuildSandbox,
        number: usize,
        package: &Packed,
        bytes: u64,
        sharing: Sharing,
    ) -> Result<Tree, PackageError> {
        let stream = sandbox
            .take(&stream_file(number), bytes.saturating_add(ROOM_FOR_HEADERS))
            .await?;
        let store = Arc::clone(&self.installer.store);
        let bounds = Bounds {
            files: self.installer.limits.files,
            bytes,
        };
        let tree = blocking(move || store.add(stream, bounds, sharing)).await?;
        if tree.record.package == package.name {
            return Ok(tree);
        }
        // A shared tree stays under the hash of its content, where it may be used by others; no key
        // refers to it.
        if sharing == Sharing::Private {
            let _ = self.installer.store.remove(&tree.name);
        }
        Err(PackageError::Unfitting(
            "a package is not what it was said to be",
        ))
    }

    async fn find(&self, keys: &[TreeKey]) -> Result<Vec<Option<Tree>>, PackageError> {
        let (store, keys) = (Arc::clone(&self.installer.store), keys.to_vec());
        Ok(blocking(move || {
            keys.iter()
                .map(|key| store.find(key))
                .collect::<Result<Vec<_>, _>>()
        })
        .await?)
    }

    async fn open_build_sandbox(&self) -> Result<Box<dyn BuildSandbox>, PackageError> {
        let index = self.installer.index.clone();
        let mut rules = blocking(move || index.rules()).await;
        rules.extend(
            self.open
                .iter()
                .filter_map(|requirement| match requirement.source() {
                    RequirementSource::Wheel(location) | RequirementSource::Code(location) => {
                        Some(location.to_string())
                    }
                    RequirementSource::Index => None,
                }),
        );
        rules.dedup();
        self.build_sandboxes.open(&rules).await
    }

    /// Runs an installer step (`InstallerStep`) inside and parses its reply.
    async fn ask<T: DeserializeOwned>(
        &self,
        sandbox: &mut dyn BuildSandbox,
        step: InstallerStep<'_>,
    ) -> Result<InstallerReply<T>, PackageError> {
        let certificates = match &self.installer.index.ca_file {
            Some(path) => {
                sandbox
                    .put(
                        CERTIFICATES_FILE,
                        read_certificates(path).map_err(PackageError::Certificates)?,
                    )
                    .await?;
                Some(CERTIFICATES_FILE)
            }
            None => None,
        };
        let uv = sandbox.uv();
        let request = InstallerRequest {
            step,
            uv: &uv,
            variables: &self.installer.index.variables(),
            certificates,
        };
        let request = serde_json::to_vec(&request).expect("texts can always be written as JSON");
        sandbox.put(REQUEST_FILE, request).await?;
        let left = self
            .installer
            .limits
            .time
            .saturating_sub(self.begun.elapsed());
        let printed = sandbox.run(INSTALLER, left).await?;
        let mut answer = Vec::new();
        let file =
            sandbox
                .take(ANSWER_FILE, MAX_ANSWER_BYTES)
                .await
                .map_err(|error| match error {
                    // The installer ended without a reply; its output is the only hint at the
                    // cause.
                    PackageError::BuildSandbox { why } => PackageError::BuildSandbox {
                        why: format!("{why}\n{printed}"),
                    },
                    other => other,
                })?;
        let read = file.take(MAX_ANSWER_BYTES).read_to_end(&mut answer);
        read.map_err(|_| PackageError::Unfitting("it cannot be read"))?;
        cellblock_json::read(&answer, ANSWER)
            .map_err(|_| PackageError::Unfitting("it is not of the agreed form"))
    }

    fn wanted(&self) -> WantedPackages<'_> {
        WantedPackages {
            requirements: self
                .open
                .iter()
                .map(|requirement| requirement.text())
                .collect(),
            present: self.present.clone(),
            named: self
                .open
                .iter()
                .filter_map(|requirement| requirement.name())
                .collect(),
            upgrade: self.request.upgrade,
        }
    }

    /// Returns the cache key of a reply, or `None` if the resolver must run again: a URL may lead
    /// to different content next time.
    fn question(&self) -> Option<Question> {
        let from_index = self
            .open
            .iter()
            .all(|requirement| *requirement.source() == RequirementSource::Index);
        let mut requirements: Vec<String> = self
            .open
            .iter()
            .map(|requirement| requirement.text().to_owned())
            .collect();
        requirements.sort();
        let present = self
            .present
            .iter()
            .map(|(name, version)| ((*name).to_owned(), (*version).to_owned()))
            .collect();
        (from_index && !self.request.upgrade).then_some(Question {
            requirements,
            present,
        })
    }

    fn has(&self, pin: &Pin) -> bool {
        pin.url.is_none() && self.present.get(pin.name.as_str()).copied() == pin.version.as_deref()
    }

    /// Returns the store key of a pin. The hashes are part of the key, so a file that was replaced
    /// in the index is fetched again. A wheel requested by URL has no index and no version, only
    /// its hash: the same file always gives the same tree.
    fn key(&self, pin: &Pin, tag: &str) -> TreeKey {
        let (index, version) = match &pin.version {
            Some(version) => (self.installer.index.identity(), version.as_str()),
            None => (String::new(), ""),
        };
        TreeKey::new(&["1", &index, tag, &pin.name, version, &pin.hashes.join(" ")])
    }

    /// Converts a failed reply into an error.
    fn failure<T>(&self, answer: InstallerReply<T>) -> PackageError {
        match answer {
            InstallerReply::Failed { no_room: true, .. } => PackageError::NoRoom {
                disk: self.installer.limits.disk,
            },
            InstallerReply::Failed { failed, .. } => self.refused(failed),
            InstallerReply::Done(_) => {
                PackageError::Unfitting("an answer that was understood is none")
            }
        }
    }

    /// Adds advice for the caller if a version that the session has causes the conflict.
    fn refused(&self, mut words: String) -> PackageError {
        let named: Vec<&str> = self
            .open
            .iter()
            .filter_map(|requirement| requirement.name())
            .collect();
        let is_fixed = |(name, version): &(&&str, &&str)| {
            !named.contains(*name) && words.contains(&format!("{name}=={version}"))
        };
        let fixed: Vec<String> = self
            .present
            .iter()
            .filter(is_fixed)
            .map(|(name, version)| format!("{name} {version}"))
            .collect();
        if !fixed.is_empty() {
            words.push_str(&format!(
                "\nThe session has {} already; name it in the request too if it may be replaced.",
                fixed.join(", ")
            ));
        }
        PackageError::Refused { words }
    }
}

fn report(request: &PackageRequest, chosen: Chosen) -> InstallResult {
    let Chosen {
        trees,
        already,
        held_back,
    } = chosen;
    let added: Vec<PackageVersion> = trees
        .iter()
        .map(|tree| PackageVersion::new(&tree.record.package, &tree.record.version))
        .collect();
    let mut lines = Vec::new();
    for name in request.requirements.iter().filter_map(Requirement::name) {
        if let Some(package) = already.iter().find(|package| package.name == name) {
            lines.push(format!(
                "Requirement already satisfied: {name} ({})",
                package.version
            ));
        }
    }
    lines.dedup();
    if !added.is_empty() {
        let names: Vec<String> = added.iter().map(PackageVersion::to_string).collect();
        lines.push(format!("Successfully installed {}", names.join(" ")));
    }
    lines.extend(held_back.iter().map(remark));
    if lines.is_empty() {
        lines
            .push("Nothing had to be installed: no requirement applies to this Python.".to_owned());
    }
    let is_private = |tree: &&Tree| tree.record.sharing == Sharing::Private;
    InstallResult {
        paths: trees
            .iter()
            .map(|tree| Path::new(PACKAGES_INSIDE).join(tree.name.as_str()))
            .collect(),
        private: trees
            .iter()
            .filter(is_private)
            .map(|tree| tree.name.clone())
            .collect(),
        added,
        already,
        text: lines.join("\n"),
    }
}

/// Reports that a newer version exists, which packages prevent it, and how to install it anyway.
fn remark(held: &HeldBack) -> String {
    let HeldBack {
        name,
        version,
        newer,
        replaced,
    } = held;
    let has = replaced
        .iter()
        .map(|one| format!("{} {}", one.name, one.version))
        .collect::<Vec<_>>()
        .join(", ");
    let exactly = |name: &str, version: &str| format!("\"{name}=={version}\"");
    let wanted = replaced.iter().map(|one| exactly(&one.name, &one.wanted));
    let request = std::iter::once(exactly(name, newer))
        .chain(wanted)
        .collect::<Vec<_>>()
        .join(", ");
    format!(
        "{name} {version} is not the newest version: {newer} cannot be used with {has}, which the \
         session has. To get it and \
         replace what is in its way, install {request} together."
    )
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work)
        .await
        .expect("work on files does not panic")
}

fn read_certificates(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    std::fs::File::open(path)?
        .take(MAX_CERTIFICATES_BYTES + 1)
        .read_to_end(&mut content)?;
    if content.len() as u64 > MAX_CERTIFICATES_BYTES {
        return Err(io::Error::other("the file is too large"));
    }
    Ok(content)
}

/// Keeps the beginning and the end of a long text, and replaces control characters.
fn shortened(words: &str) -> String {
    let line = |line: &str| -> String {
        let shown = |letter: char| if letter.is_control() { ' ' } else { letter };
        line.trim_end()
            .chars()
            .take(MAX_LINE_LENGTH)
            .map(shown)
            .collect()
    };
    let lines: Vec<String> = words.lines().map(line).collect();
    if lines.len() <= LINES_KEPT {
        return lines.join("\n");
    }
    let (head, tail) = (LINES_KEPT * 3 / 4, LINES_KEPT / 4);
    let left_out = format!("… {} lines are left out …", lines.len() - head - tail);
    [&lines[..head], &[left_out], &lines[lines.len() - tail..]]
        .concat()
        .join("\n")
}

#[cfg(test)]
mod tests;
