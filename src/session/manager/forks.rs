//! Forks: names and capacity are reserved before the copies are made, so that all forks of a
//! request are created or none.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{DriverHandle, Sessions, Table, shut_down};
use crate::session::driver::{
    ForkedSession, ForksWanted, SessionJob, SessionOrigin, SharedSession, UnstartedFork,
};
use crate::session::tools::Grant;
use crate::session::{
    ForkNames, ForkReport, ForkRequest, MAX_FORKS, Principal, Refused, SessionId, UndoPolicy,
};

/// Limit in characters for the suffix added to a source's name, so that part of that name remains.
const MAX_SUFFIX_LENGTH: usize = 48;

/// A session that waits for its fork. If it is dropped without one, the session is removed.
pub(in crate::session) struct Reservation {
    pub(in crate::session) id: SessionId,
    entry: DriverHandle,
    fork: oneshot::Sender<Box<UnstartedFork>>,
}

impl Reservation {
    /// Gives the session its interpreter and sandbox.
    pub(in crate::session) fn take(self, fork: Box<UnstartedFork>) -> SessionId {
        // If the session was closed in the meantime, the fork is destroyed when dropped.
        let _ = self.fork.send(fork);
        self.id
    }
}

impl Sessions {
    /// Creates sessions with a copy of everything this one has, each in its own sandbox. All are
    /// created or none.
    ///
    /// Dropping the future removes the sessions that are not finished.
    pub async fn fork(
        &self,
        owner: &Principal,
        id: &SessionId,
        request: impl Into<ForkRequest>,
    ) -> Result<ForkReport, Refused> {
        let ForkRequest { names, servers } = request.into();
        let source = self.find(owner, id)?;
        let granted = servers
            .map(|entries| self.grants_named(owner, id, &source, &entries))
            .transpose()?;
        let count = match &names {
            ForkNames::Count(count) => *count as usize,
            ForkNames::Named(names) => names.len(),
        };
        if count == 0 || count > MAX_FORKS as usize {
            return Err(Refused::ForkCount { count });
        }
        let reservations = self.reserve_for_forks(owner, id, names)?;
        let wanted = ForksWanted {
            count,
            undoable: self.inner.settings.undo != UndoPolicy::Off,
        };
        let forked = match self
            .fork_of(owner, id, &source, wanted, &CancellationToken::new())
            .await
        {
            Ok(forked) => forked,
            Err(refused) => {
                for Reservation { entry, fork, .. } in reservations {
                    drop(fork);
                    shut_down(&entry).await;
                }
                return Err(refused);
            }
        };
        let mut forked = forked;
        if let Some(granted) = &granted {
            forked
                .forks
                .iter_mut()
                .for_each(|fork| fork.grant_only(granted));
        }
        let forks = reservations
            .into_iter()
            .zip(forked.forks)
            .map(|(reservation, fork)| reservation.take(Box::new(fork)))
            .collect();
        Ok(ForkReport {
            forks,
            lost: forked.lost,
            files: forked.files,
            notes: vec![forked.draws],
        })
    }

    /// Parses the tools that forks may use; each entry is a server or some of its tools. A tool
    /// that the source may not use looks the same as one that does not exist.
    fn grants_named(
        &self,
        owner: &Principal,
        id: &SessionId,
        source: &DriverHandle,
        entries: &[String],
    ) -> Result<Vec<Grant>, Refused> {
        let packages = self
            .inner
            .settings
            .tools
            .0
            .as_ref()
            .map(|broker| broker.packages(owner))
            .unwrap_or_default();
        let held = source.shared.facts().grants.clone();
        let has = |server: &str, fits: &dyn Fn(&str) -> bool| {
            let package = packages
                .iter()
                .find(|package| package.server.as_str() == server);
            package.is_some_and(|package| {
                package
                    .tools
                    .iter()
                    .any(|tool| fits(&tool.original) && held.allow(server, &tool.original))
            })
        };
        let read = |entry: &String| {
            let known = packages.iter().map(|package| package.server.as_str());
            let known = known.filter(|server| has(server, &|_| true) || held.allow_all_of(server));
            let grant = Grant::parse(entry, known);
            let grant = grant.filter(|grant| {
                grant.tool.is_anything() || has(&grant.server, &|tool| grant.tool.fits(tool))
            });
            grant.ok_or_else(|| Refused::NoServer {
                name: entry.clone(),
            })
        };
        let list = entries
            .iter()
            .map(read)
            .collect::<Result<Vec<Grant>, Refused>>()?;
        if held.narrowed(&list).is_none() {
            let why = "its tools were narrowed too many times already; name them without stars"
                .to_owned();
            return Err(Refused::CannotCopy {
                id: id.clone(),
                why,
            });
        }
        Ok(list)
    }

    /// Reserves sessions for forks that are still being made, so that their names and their
    /// capacity are taken.
    fn reserve_for_forks(
        &self,
        owner: &Principal,
        source: &SessionId,
        names: ForkNames,
    ) -> Result<Vec<Reservation>, Refused> {
        let mut table = self.table();
        let names = match names {
            ForkNames::Count(count) => {
                let free = (1..).map(|number| named_after(source, &number.to_string()));
                free.filter(|id| !table.knows(owner, id))
                    .take(count as usize)
                    .collect()
            }
            ForkNames::Named(names) => {
                let mut seen = HashSet::new();
                if let Some(taken) = names
                    .iter()
                    .find(|id| table.knows(owner, id) || !seen.insert(*id))
                {
                    return Err(Refused::NameTaken { id: taken.clone() });
                }
                names
            }
        };
        if table.closing {
            return Err(Refused::ShuttingDown);
        }
        self.take_room(&table, owner, names.len())?;
        let note = format!("This session is a fork of `{source}`.");
        let reservation = |id| {
            self.reserve(
                &mut table,
                owner,
                id,
                note.clone(),
                Arc::new(self.new_shared()),
            )
        };
        Ok(names.into_iter().map(reservation).collect())
    }

    fn reserve(
        &self,
        table: &mut Table,
        owner: &Principal,
        id: SessionId,
        note: String,
        shared: Arc<SharedSession>,
    ) -> Reservation {
        let (fork, arrival) = oneshot::channel();
        let origin = SessionOrigin::Fork {
            fork: arrival,
            note: Some(note),
        };
        let entry = self.open(table, (owner.clone(), id.clone()), origin, shared);
        Reservation { id, entry, fork }
    }

    /// Creates a session for an existing fork, named after its source and `name`.
    pub(in crate::session) fn reserve_for_variant(
        &self,
        owner: &Principal,
        source: &SessionId,
        name: &str,
        note: String,
        shared: Arc<SharedSession>,
    ) -> Result<Reservation, Refused> {
        let mut table = self.table();
        if table.closing {
            return Err(Refused::ShuttingDown);
        }
        self.check_room(&table, owner, 1)?;
        // The sandbox was counted when the variant started.
        self.inner
            .accounts
            .check_starts(owner, table.starts(owner, 0, 1))?;
        let others = (2..).map(|number| named_after(source, &format!("{name}-{number}")));
        let id = std::iter::once(named_after(source, name))
            .chain(others)
            .find(|id| !table.knows(owner, id))
            .expect("the numbers do not end");
        Ok(self.reserve(&mut table, owner, id, note, shared))
    }

    /// Starts a driver for a variant that only the caller can see. It ends when the caller drops
    /// it. Nothing in it is kept for an undo.
    pub(in crate::session) fn hide(
        &self,
        owner: &Principal,
        source: &SessionId,
        name: &str,
        fork: UnstartedFork,
        seed: u64,
    ) -> Result<DriverHandle, Refused> {
        let (hand, arrival) = oneshot::channel();
        let _ = hand.send(Box::new(fork));
        let origin = SessionOrigin::Variant {
            fork: arrival,
            seed,
        };
        self.hide_as(
            named_after(source, name),
            Some(self.quota_scope(owner, source)),
            origin,
        )
    }

    /// Requests forks of a session. They have no owner until they are taken.
    pub(in crate::session) async fn fork_of(
        &self,
        owner: &Principal,
        id: &SessionId,
        source: &DriverHandle,
        wanted: ForksWanted,
        cancel: &CancellationToken,
    ) -> Result<ForkedSession, Refused> {
        let (reply, answer) = oneshot::channel();
        let forked = self
            .ask(source, SessionJob::Fork { wanted, reply }, answer, cancel)
            .await;
        forked.unwrap_or_else(|error| Err(self.explained(owner, id, error)))
    }
}

/// Returns the id of a session derived from another one: `<source>-<suffix>`. The source's name is
/// shortened if necessary. Characters that an id may not contain become `-`.
fn named_after(source: &SessionId, suffix: &str) -> SessionId {
    let allowed =
        |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '.' | '-');
    let safe = |character: char| if allowed(character) { character } else { '-' };
    let suffix = suffix
        .chars()
        .map(safe)
        .take(MAX_SUFFIX_LENGTH)
        .collect::<String>();
    let room = 64 - 1 - suffix.len();
    let base = source.as_str().get(..room).unwrap_or(source.as_str());
    format!("{base}-{suffix}")
        .parse()
        .expect("its characters are allowed and its length is bounded")
}
