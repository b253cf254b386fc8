//! Gives memory back that nothing uses, for as long as a server runs.

use std::time::Duration;

/// Rarely enough to cost nothing, and soon after a burst.
const INTERVAL: Duration = Duration::from_secs(30);

/// Never returns.
pub(super) async fn keep_small() {
    loop {
        tokio::time::sleep(INTERVAL).await;
        // It holds up whoever wants memory, for a millisecond or so, but no task of this runtime.
        let _ = tokio::task::spawn_blocking(cellblock_jail::memory::give_back).await;
    }
}
