//! What containers of an image need not import from files, because one cache has it for all of
//! them.

use super::on_docker;
use crate::support::containers::{IMAGE, TestEngine};

/// How many modules came from the cache; not those of a session, which are found as always.
const TAKEN: &str = "import cellblock_runner.import_cache as cache, colorsys; print(cache.taken)";
/// Opens the cache, for reading and for writing.
const SPOIL: &str = "open(cache.PATH, 'rb')\ntry:\n    open(cache.PATH, 'ab')\nexcept \
                     OSError:\n    print('refused')";

/// An image like that of the tests, whose volume nobody else uses.
fn image_of_its_own(engine: &TestEngine, name: &str) {
    let container = engine.command(&["create", "--network=none", IMAGE, "true"]);
    engine.command(&[
        "commit",
        "--change",
        "LABEL for=import-cache",
        container.trim(),
        name,
    ]);
    engine.command(&["rm", container.trim()]);
}

fn count(text: &str) -> u32 {
    text.trim().parse().unwrap()
}

#[test]
fn every_container_of_an_image_takes_its_modules_from_one_cache() {
    on_docker(async |engine| {
        let image = "cellblock-test:import-cache";
        image_of_its_own(engine, image);
        let containers = engine.build().image(image).start();
        let (first, second) = (containers.session(), containers.session());
        let taken = count(&first.ok(TAKEN).await);
        assert!(taken > 100, "{taken}");
        assert_eq!(count(&second.ok(TAKEN).await), taken);
        let container = engine.container_of(&first).await;
        assert_ne!(engine.container_of(&second).await, container);
        // Also a reset has it: one process serves all sessions of a container.
        second.reset().await;
        assert_eq!(count(&second.ok(TAKEN).await), taken);
        // What is in it is nothing that a session could change.
        assert_eq!(first.ok(SPOIL).await, "refused\n");

        // One that is damaged is not used, and sessions do without it.
        let volume = engine.command(&[
            "inspect",
            "--format",
            "{{ (index .Mounts 0).Name }}",
            &container,
        ]);
        let mount = format!("--volume={}:/x", volume.trim());
        let inside = |command: &str| {
            engine.command(&[
                "run",
                "--rm",
                "--network=none",
                &mount,
                IMAGE,
                "sh",
                "-c",
                command,
            ])
        };
        inside("printf x >> /x/ready/import_cache");
        let third = containers.session();
        assert_eq!(third.ok(TAKEN).await, "0\n");
        containers.end().await;

        // The next server lays in another one where there is none.
        inside("rm /x/ready/import_cache");
        let containers = engine.build().image(image).start();
        assert_eq!(count(&containers.session().ok(TAKEN).await), taken);
        containers.end().await;
        // An engine forgets a container before it lets go of its volume, so these may stay; the
        // engine of the tests goes as a whole.
        engine.try_command(&["volume", "rm", volume.trim()]);
        engine.try_command(&["image", "rm", image]);
    });
}
