//! Connections that follow a loss are also cut, at each of their messages.

use super::*;

/// A message of a connection that follows a loss: the first bytes of one direction.
#[derive(Debug, Clone, Copy)]
struct Next {
    line: Line,
    way: proxy::Way,
}

/// The session's hello and its answer, the status question and its answer (specs/extension.md §13, §6).
const HELLO: Next = Next { line: Line::Main, way: proxy::Way::Forward };
const ANSWER: Next = Next { line: Line::Main, way: proxy::Way::Back };
const QUESTION: Next = Next { line: Line::Other, way: proxy::Way::Forward };
const STATUS: Next = Next { line: Line::Other, way: proxy::Way::Back };

/// Cuts at a message, and then at the first bytes of a connection that follows.
fn cut_again(first: (Message, Place), next: Next, place: Place, struck: &Arc<AtomicBool>) -> Filter {
    let (was_cut, struck) = (Arc::new(AtomicBool::new(false)), Arc::clone(struck));
    let mut first = cut_at(first.0, first.1, &was_cut);
    Box::new(move |line, way, offset, piece| {
        if !was_cut.load(Ordering::SeqCst) {
            return first(line, way, offset, piece);
        }
        if (line, way, offset) != (next.line, next.way, 0) || struck.swap(true, Ordering::SeqCst) {
            return Verdict::Pass;
        }
        match place {
            Place::Before => piece.clear(),
            Place::Within => piece.truncate(piece.len() / 2),
            Place::After => return Verdict::CutSettled,
        }
        Verdict::Cut
    })
}

fn message(name: &str) -> Message {
    *MESSAGES.iter().find(|message| message.name == name).unwrap()
}

fn cut_each(first: (&str, Place), nexts: [Next; 2], has_window: bool, is_right: impl Fn(End) -> bool) {
    common::trace();
    let form = |lanes| Form { lanes, has_window, is_postcopy: false };
    for (form, next) in [form(0), form(2)].into_iter().flat_map(|form| nexts.map(|next| (form, next))) {
        for place in Place::ALL {
            let (bench, struck) = (Bench::new(), Arc::new(AtomicBool::new(false)));
            let filter = cut_again((message(first.0), first.1), next, place, &struck);
            let end = bench.migrate(form, filter);
            let case = format!("{next:?} {place:?} {form:?}");
            assert!(struck.load(Ordering::SeqCst), "{case} was not sent: {end:?}");
            assert!(is_right(end), "{case}: {end:?}");
        }
    }
}

#[test]
fn session_cut_at_its_first_messages_is_followed_by_another() {
    let is_right = |end| matches!(end, End::Arrived { reconnections: 1.. });
    cut_each(("PING round", Place::After), [HELLO, ANSWER], true, is_right);
    cut_each(("PING prepare", Place::Before), [HELLO, ANSWER], true, is_right);
}

#[test]
fn session_after_a_lost_answer_to_prepare_cut_at_its_first_messages_is_followed_by_another() {
    let is_right = |end| matches!(end, End::Arrived { reconnections: 1.. });
    cut_each(("PONG prepare", Place::Before), [HELLO, ANSWER], true, is_right);
}

#[test]
fn status_question_cut_at_its_messages_is_asked_again() {
    for has_window in [false, true] {
        cut_each(("SHUT", Place::Before), [QUESTION, STATUS], has_window, |end| end != End::AtSource);
        cut_each(("EOF", Place::Before), [QUESTION, STATUS], has_window, |end| end == End::AtSource);
    }
}
