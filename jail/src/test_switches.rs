//! Switches with which tests skip parts of the lock-down: to verify that the other parts hold
//! alone, or that an incomplete interpreter is refused.
//!
//! They exist only in development builds with the feature `test-support`. In every other build
//! `TestSwitches` is empty and each of its methods returns a constant, so a release binary has no
//! switches. The condition includes `debug_assertions` because `cargo bench` makes release builds
//! with the features of tests.

pub use imp::TestSwitches;

#[cfg(any(test, all(feature = "test-support", debug_assertions)))]
mod imp {
    use serde::{Deserialize, Serialize};

    use crate::wire::OmittedLayer;

    /// Parts of the lock-down that are skipped.
    #[derive(Debug, Clone, Default, Serialize, Deserialize)]
    pub struct TestSwitches {
        /// Layers that are skipped although the machine supports them.
        pub layers_left_out: Vec<OmittedLayer>,
        /// Makes mounts writable that are read-only by default.
        pub mounts_writable: bool,
        /// Steps of the programs in `twin`, by name, that have no effect.
        pub skipped_steps: Vec<String>,
    }

    impl TestSwitches {
        pub fn layers_left_out(&self) -> &[OmittedLayer] {
            &self.layers_left_out
        }

        pub(crate) fn mounts_writable(&self) -> bool {
            self.mounts_writable
        }

        pub(crate) fn skips(&self, step: &str) -> bool {
            self.skipped_steps.iter().any(|skipped| skipped == step)
        }
    }
}

#[cfg(not(any(test, all(feature = "test-support", debug_assertions))))]
mod imp {
    use serde::{Deserialize, Serialize};

    use crate::wire::OmittedLayer;

    /// No part is skipped in this build.
    #[derive(Debug, Clone, Default, Serialize, Deserialize)]
    pub struct TestSwitches {}

    impl TestSwitches {
        pub fn layers_left_out(&self) -> &[OmittedLayer] {
            &[]
        }

        pub(crate) fn mounts_writable(&self) -> bool {
            false
        }

        pub(crate) fn skips(&self, _step: &str) -> bool {
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TestSwitches;

    #[test]
    fn switches_are_off_by_default() {
        let off = TestSwitches::default();
        assert!(off.layers_left_out().is_empty());
        assert!(!off.mounts_writable());
        assert!(!off.skips("seccomp"));
        let on = TestSwitches {
            skipped_steps: vec!["seccomp".to_owned()],
            ..TestSwitches::default()
        };
        assert!(on.skips("seccomp") && !on.skips("landlock"));
    }
}
