//! Finds a place for a server's control groups, and asks systemd for one where that is required.
//!
//! ```text
//! 1. the unit of this process, if systemd has delegated it   limits of the unit apply to sessions
//! 2. a scope that systemd makes for the guardian             limits of the slice apply to sessions
//! 3. the top of the tree, for root
//! ```
//!
//! Without systemd, and under version 1, the server's own group is used.

use cellblock_jail::cgroup::{CgroupRefusal, CgroupTree, Unit};
use rustix::process::geteuid;
use tracing::debug;

use super::systemd::Manager;

/// Makes the folder of one server, which the guardian will enter. Returns the reason if that is not
/// possible here.
pub(super) async fn make(name: &str, guardian: u32) -> Result<CgroupTree, String> {
    let (why_not_here, unit) = match CgroupTree::make(name, guardian) {
        Ok(tree) => return Ok(tree),
        Err(CgroupRefusal { why, unit: None }) => return Err(why),
        Err(CgroupRefusal {
            why,
            unit: Some(unit),
        }) => (why, unit),
    };
    match ask_systemd(name, guardian, &unit).await {
        Ok(tree) => Ok(tree),
        Err(why) if geteuid().is_root() => {
            debug!(%why, "systemd gives no control group, so the top of the tree is used");
            CgroupTree::make_at_top(name)
        }
        Err(why) => Err(format!("{why_not_here}, and systemd gives none: {why}")),
    }
}

async fn ask_systemd(name: &str, guardian: u32, unit: &Unit) -> Result<CgroupTree, String> {
    let manager = Manager::connect().await?;
    let manages_unit = manager.is_of_user == unit.of_user_manager;
    // systemd 252 does not mark groups delegated by a user manager.
    if manages_unit && !unit.is_delegated() && manager.delegates(unit.name()).await.unwrap_or(false)
    {
        match CgroupTree::make_in_unit(unit, name, guardian) {
            Ok(tree) => return Ok(tree),
            Err(why) => debug!(%why, "the delegated unit cannot be used"),
        }
    }
    let slice = unit.slice.as_deref().filter(|_| manages_unit);
    manager
        .start_scope(&format!("{name}.scope"), guardian, slice)
        .await?;
    CgroupTree::make_in_scope(name, guardian)
}
