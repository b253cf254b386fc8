//! Tests of sessions, with the fake backend and a paused clock, one file per subject. This file
//! tests the values that callers pass in.

mod approvals;
mod branching;
mod files;
mod following;
mod lifecycle;
mod quotas;
mod scheduler;
mod shell;
mod tools;

use super::*;

#[test]
fn session_ids_that_could_be_paths_or_are_unprintable_are_refused() {
    for good in ["a", "default", "A-1_b.c", "...", &"x".repeat(64)] {
        assert!(SessionId::from_str(good).is_ok(), "{good:?}");
    }
    for bad in [
        "",
        ".",
        "..",
        "a/b",
        "../a",
        "a b",
        "a\n",
        "a\0",
        "ä",
        &"x".repeat(65),
    ] {
        assert_eq!(SessionId::from_str(bad), Err(BadSessionId), "{bad:?}");
    }
}

#[test]
fn a_random_session_id_is_a_name_like_any_other_and_comes_once() {
    let ids = (0..1000)
        .map(|_| SessionId::random())
        .collect::<std::collections::HashSet<_>>();
    assert_eq!(ids.len(), 1000);
    for id in ids {
        assert!(id.looks_generated());
        assert_eq!(
            (id.as_str().len(), SessionId::from_str(id.as_str()).unwrap()),
            (28, id)
        );
    }
    for chosen in [
        "default",
        "s-1",
        "s-0000000000000000000000000",
        "s-OOOOOOOOOOOOOOOOOOOOOOOOOO",
    ] {
        assert!(
            !SessionId::from_str(chosen).unwrap().looks_generated(),
            "{chosen}"
        );
    }
}

#[test]
fn paths_stay_below_the_working_folder() {
    for good in ["a", "data/table.csv", "..a", "ä/ö", &"x".repeat(255)] {
        assert!(InsidePath::from_str(good).is_ok(), "{good:?}");
    }
    let cases = [
        ("", BadInsidePath::Empty),
        ("/etc/passwd", BadInsidePath::Absolute),
        ("a/../b", BadInsidePath::Parent),
        ("..", BadInsidePath::Parent),
        ("a//b", BadInsidePath::EmptyPart),
        ("a/", BadInsidePath::EmptyPart),
        ("./a", BadInsidePath::EmptyPart),
        ("a\nb", BadInsidePath::ControlCharacter),
        ("a\0", BadInsidePath::ControlCharacter),
    ];
    for (bad, why) in cases {
        assert_eq!(InsidePath::from_str(bad), Err(why), "{bad:?}");
    }
    assert_eq!(
        InsidePath::from_str(&"x".repeat(256)),
        Err(BadInsidePath::TooLong)
    );
    assert_eq!(
        InsidePath::from_str(&"x/".repeat(2100)),
        Err(BadInsidePath::TooLong)
    );
}

#[test]
fn a_refused_undo_says_what_can_be_undone() {
    let id = SessionId::from_str("a").unwrap();
    let text = |possible: &[u32]| {
        let why = None;
        Refused::NothingToUndo {
            id: id.clone(),
            cells: 5,
            possible: possible.to_vec(),
            why,
        }
        .to_string()
    };
    assert_eq!(
        text(&[]),
        "nothing in `a` can be undone: no earlier state of it is kept"
    );
    assert_eq!(
        text(&[1, 2]),
        "5 cells of `a` cannot be undone; at most 2 cells can"
    );
    assert_eq!(
        text(&[1, 3]),
        "5 cells of `a` cannot be undone. These numbers of cells can: 1, 3"
    );
}
