//! The driver's part in packages: what a session has been given.
//!
//! A session has a package because its folder is on the path of its Python. So the memory of a session says which it has, copies have them too,
//! and an undo takes them back. What is kept here is for the one case in which memory is lost on purpose: a reset gives the packages again.

use std::sync::atomic::Ordering;

use serde_json::json;

use super::Driver;

impl Driver {
    /// Notes what the session has from now on, the latest first.
    pub(super) fn have(&mut self, paths: &[String]) {
        let packages = &mut self.shared.facts().packages;
        packages.retain(|path| !paths.contains(path));
        packages.splice(0..0, paths.iter().cloned());
    }

    /// Gives a fresh interpreter what the session had. The runner does it before anything that is sent later.
    pub(super) fn give_packages_again(&mut self) {
        let packages = self.shared.facts().packages.clone();
        if !packages.is_empty() {
            let id = self.numbers.fetch_add(1, Ordering::Relaxed);
            let frame = json!({"type": "packages", "id": id, "paths": packages});
            self.send(&frame, b"");
        }
    }
}
