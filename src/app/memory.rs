//! Returns unused memory to the system periodically while a server runs.

use std::time::Duration;

/// Rare enough to cost nothing, and soon after a burst.
const INTERVAL: Duration = Duration::from_secs(30);

/// Never returns.
pub(super) async fn keep_small() {
    loop {
        tokio::time::sleep(INTERVAL).await;
        // It blocks concurrent allocations for about a millisecond, but no task of this runtime.
        let _ = tokio::task::spawn_blocking(cellblock_jail::memory::trim_heap).await;
    }
}
