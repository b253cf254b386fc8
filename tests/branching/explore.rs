//! Several cells tried side by side in real forks.

use std::path::PathBuf;
use std::time::Duration;

use cellblock::session::{ExploreRequest, Keep, Principal, Status, Variant};
use cellblock_jail::wire::Bind;

use super::TIGHT;
use crate::support::has_control_groups;
use crate::support::native::{self, Builder, Session, run};

fn request(variants: &[(&str, &str)], keep: Keep, replace: bool) -> ExploreRequest {
    let variant = |(name, code): &(&str, &str)| Variant {
        name: (*name).to_owned(),
        code: (*code).to_owned(),
    };
    ExploreRequest {
        variants: variants.iter().map(variant).collect(),
        timeout: Duration::from_secs(4),
        max_output_chars: 1000,
        keep,
        replace,
        recorder: Default::default(),
    }
}

const VARIANTS: [(&str, &str); 5] = [
    (
        "good",
        "score = x + 1; open('file', 'w').write('good'); print('good')",
    ),
    (
        "better",
        "score = x + 2; open('file', 'w').write('better'); print('better')",
    ),
    ("crash", "import os; os._exit(9)"),
    ("slow", "import time\nwhile True: time.sleep(60)"),
    ("greedy", "large = bytearray(500 << 20)"),
];

#[test]
fn five_variants_end_in_five_ways_and_the_best_takes_the_place_of_the_source() {
    if !has_control_groups() {
        return;
    }
    run(async {
        let mark = tempfile::Builder::new()
            .prefix("cellblock-mark-")
            .tempdir()
            .unwrap();
        let bind = Bind {
            host: mark.path().to_owned(),
            inside: PathBuf::from("/opt/mark"),
        };
        let backend = Builder::new("minimal").limits(TIGHT).bind(bind).start();
        let session = backend.session();
        session.ok("x = 1; open('file', 'w').write('source')").await;
        let sandboxes = || {
            let all = native::marked_processes(mark.path());
            all.iter()
                .filter(|process| process.name == "cb-init")
                .count()
        };
        assert_eq!(sandboxes(), 1);

        // Nothing is kept: the source is as it was.
        let report = session
            .explore(request(&VARIANTS, Keep::Nothing, false))
            .await
            .unwrap();
        let names = |report: &cellblock::session::ExploreReport| -> Vec<(String, &'static str)> {
            let status = |ended: &Result<cellblock::session::Outcome, _>| {
                ended.as_ref().expect("it ran").status.name()
            };
            report
                .variants
                .iter()
                .map(|variant| (variant.name.clone(), status(&variant.ended)))
                .collect()
        };
        let expected = [
            ("good", "ok"),
            ("better", "ok"),
            ("crash", "died"),
            ("slow", "timeout"),
            ("greedy", "out_of_memory"),
        ];
        assert_eq!(
            names(&report),
            expected.map(|(name, status)| (name.to_owned(), status))
        );
        assert_eq!((report.kept.len(), report.replaced), (0, false));
        assert!(
            report
                .variants
                .iter()
                .all(|variant| variant.score.is_none())
        );
        assert_eq!(
            session
                .ok("print(x, 'score' in globals(), open('file').read())")
                .await,
            "1 False source\n"
        );
        assert_eq!(sandboxes(), 1);

        let best = Keep::Best {
            by: "score".to_owned(),
        };
        let report = session
            .explore(request(&VARIANTS, best, true))
            .await
            .unwrap();
        assert_eq!(report.kept, [("better".to_owned(), session.id.clone())]);
        assert!(report.replaced);
        let scores: Vec<_> = report
            .variants
            .iter()
            .map(|variant| variant.score.clone())
            .collect();
        assert_eq!((&scores[0], &scores[1]), (&Some(Ok(2.0)), &Some(Ok(3.0))));
        assert!(
            scores[2..]
                .iter()
                .all(|score| matches!(score, Some(Err(_)))),
            "{scores:?}"
        );
        let first = report.variants[1].ended.as_ref().unwrap();
        assert_eq!(
            (first.status.clone(), native::printed(first)),
            (Status::Completed, "better\n".to_owned())
        );
        assert_eq!(
            session.ok("print(score, open('file').read())").await,
            "3 better\n"
        );
        session.assert_locked_down().await;
        assert_eq!(sandboxes(), 1, "the kept one alone is left");
        session.ok("score = 0").await;
        session.undo(1).await;
        assert_eq!(session.ok("print(score)").await, "3\n");

        session.close().await;
        assert_eq!(sandboxes(), 0);
        backend.end().await;
        assert!(native::marked_processes(mark.path()).is_empty());
    });
}

#[test]
fn variants_that_are_kept_become_sessions() {
    run(async {
        let backend = native::shared();
        let session = backend.session();
        session.ok("x = 1").await;
        let variants = [("one", "x += 1"), ("two", "x += 2"), ("wrong", "1/0")];
        let report = session
            .explore(request(&variants, Keep::Named("two".to_owned()), false))
            .await
            .unwrap();
        let [(name, id)] = &report.kept[..] else {
            panic!("{:?}", report.kept)
        };
        assert_eq!(name, "two");
        let two = Session::existing(&backend.sessions, id.clone());
        assert_eq!(
            (two.ok("print(x)").await, session.ok("print(x)").await),
            ("3\n".to_owned(), "1\n".to_owned())
        );
        assert_eq!(two.fork().await.ok("print(x)").await, "3\n");
        two.close().await;

        let report = session
            .explore(request(&variants, Keep::All, false))
            .await
            .unwrap();
        assert_eq!(report.kept.len(), 3);
        for (name, id) in &report.kept {
            let kept = Session::existing(&backend.sessions, id.clone());
            let x = kept.ok("print(x)").await;
            assert_eq!(
                x.trim(),
                match name.as_str() {
                    "one" => "2",
                    "two" => "3",
                    _ => "1",
                }
            );
            kept.close().await;
        }
        let left = backend.sessions.list(&Principal::local());
        assert!(
            report
                .kept
                .iter()
                .all(|(_, id)| left.iter().all(|info| info.id != *id))
        );
    });
}
