//! A VMM's callback that panics is an error of that callback, and a thread of the engine that dies tells so.
//!
//! No code outside can undo what a migration has begun: if its threads just died, the guest would stay stopped, and no
//! limit would end it. So every thread of the engine is begun by [`spawn`], which says why it died; the threads that
//! perform a handover machine's actions catch each action apart ([`caught`]), so that what has to be undone is undone
//! after it. Which callback it was is known where it is called ([`call`]).
//!
//! This needs a program that unwinds (`panic = "unwind"`). With `panic = "abort"` the process ends, and its guest.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};

use crate::error::MigrationError;
use crate::events::{Event, Observer};

/// From so many pages on a second thread that copies is worth its start.
const COPIED_BY_A_THREAD: u64 = 1024;
/// More threads do not copy faster: memory is the limit.
const MOST_COPYING: u64 = 4;

thread_local! {
    /// The callback that the panic on its way came out of.
    static PANICKED: RefCell<Option<Cow<'static, str>>> = const { RefCell::new(None) };
}

/// While it lives, this thread is inside that callback.
struct Calling(Cow<'static, str>);

impl Drop for Calling {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The innermost is dropped first.
            PANICKED.with_borrow_mut(|name| {
                name.get_or_insert_with(|| std::mem::take(&mut self.0));
            });
        }
    }
}

/// Makes a call to the VMM under its name: `Device::save of "vga"`.
pub(crate) fn call<T>(callback: impl Into<Cow<'static, str>>, act: impl FnOnce() -> T) -> T {
    let _inside = Calling(callback.into());
    act()
}

/// Does `act`; a panic becomes an error, which names the callback that panicked, or else `place`.
///
/// Code that goes on after an error must not rely on what `act` was about to change. The engine's locks are of use
/// after a panic, which does not poison them: each is taken for whole changes only.
pub(crate) fn caught<T>(place: &str, act: impl FnOnce() -> T) -> Result<T, MigrationError> {
    PANICKED.take();
    catch_unwind(AssertUnwindSafe(act)).map_err(|panic| {
        let callback = PANICKED.take().map_or_else(|| place.to_owned(), Cow::into_owned);
        let message = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
        let error = MigrationError::Panicked {
            callback,
            message: message.unwrap_or_else(|| "(no message)".to_owned()),
        };
        tracing::error!("{error}");
        error
    })
}

/// As [`caught`], for what may fail by itself.
pub(crate) fn tried<T, E: Into<MigrationError>>(
    place: &str,
    act: impl FnOnce() -> Result<T, E>,
) -> Result<T, MigrationError> {
    caught(place, act)?.map_err(Into::into)
}

/// Has `part` copy all of `0..pages`, by as many threads as are worth it.
pub(crate) fn copied_in_parts(
    pages: u64,
    part: impl Fn(Range<u64>) -> Result<(), MigrationError> + Sync,
) -> Result<(), MigrationError> {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let threads = (pages / COPIED_BY_A_THREAD).clamp(1, MOST_COPYING.min(processors));
    let share = pages.div_ceil(threads).max(1);
    let part = &|thread: u64| part(thread * share..(thread + 1) * share);
    std::thread::scope(|scope| {
        // A part whose thread cannot be begun is copied here.
        let begun = |thread| Builder::new().spawn_scoped(scope, move || part(thread)).map_err(|_| thread);
        let others: Vec<_> = (1..threads).map(begun).collect();
        let mut done = part(0);
        for other in others {
            done = done.and(match other {
                Ok(other) => other.join().unwrap_or_else(|_| {
                    Err(MigrationError::Internal("a thread that copies pages panicked".to_owned()))
                }),
                Err(thread) => part(thread),
            });
        }
        done
    })
}

/// What falls on `pages` of items that lie side by side, counted from the first item's first page: each item with what of
/// it is skipped, and how many pages follow.
pub(crate) fn in_part<T>(
    items: &[T],
    pages: Range<u64>,
    count_of: impl Fn(&T) -> u64,
) -> impl Iterator<Item = (&T, u64, u64)> {
    let placed = items.iter().scan(0, move |before, item| {
        let begin = *before;
        *before += count_of(item);
        Some((item, begin..*before))
    });
    let Range { start, end } = pages;
    let touched = placed.skip_while(move |(_, at)| at.end <= start).take_while(move |(_, at)| at.start < end);
    touched.map(move |(item, at)| {
        let skip = start.saturating_sub(at.start);
        (item, skip, at.end.min(end) - at.start - skip)
    })
}

/// Tells `observer`. One that panics is told so, and changes nothing: what it watches must come to its end.
pub(crate) fn tell(observer: &dyn Observer, event: &Event) {
    let told = |event: &Event| caught("Observer::event", || observer.event(event));
    if let Err(error) = told(event) {
        let _ = told(&Event::Warning(format!("{error}, at {event:?}; the migration goes on")));
    }
}

/// Begins a thread. Should it panic, it calls `died` last.
///
/// # Errors
/// The operating system has no thread for it.
pub(crate) fn spawn(
    name: &str,
    work: impl FnOnce() + Send + 'static,
    died: impl FnOnce(MigrationError) + Send + 'static,
) -> Result<JoinHandle<()>, MigrationError> {
    let refused = |why: &dyn std::fmt::Display| MigrationError::System(format!("thread {name:?}: {why}"));
    #[cfg(feature = "planted-faults")]
    let planted = planted::of_this_thread();
    #[cfg(feature = "planted-faults")]
    if planted.as_deref() == Some(name) {
        return Err(refused(&"told to fail"));
    }
    let place = format!("the engine's thread {name:?}");
    let thread = Builder::new().name(name.to_owned()).spawn(move || {
        #[cfg(feature = "planted-faults")]
        planted::refuse_threads(planted.as_deref());
        #[cfg(feature = "planted-faults")]
        let work = || {
            planted::die_if_told();
            work();
        };
        if let Err(error) = caught(&place, work) {
            died(error);
        }
    });
    thread.map_err(|error| refused(&error))
}

#[cfg(feature = "planted-faults")]
pub(crate) mod planted {
    use std::cell::RefCell;

    thread_local! {
        static REFUSED: RefCell<Option<String>> = const { RefCell::new(None) };
    }

    pub(crate) fn of_this_thread() -> Option<String> {
        REFUSED.with_borrow(Clone::clone)
    }

    /// From now on no thread of that name is to be had for what this thread begins, and what that begins in turn. With
    /// `, begun` after the name it is to be had, and dies at once.
    pub fn refuse_threads(named: Option<&str>) {
        REFUSED.set(named.map(str::to_owned));
    }

    /// To be called by a thread that has begun.
    pub(crate) fn die_if_told() {
        let told = of_this_thread();
        let thread = std::thread::current();
        let dies = told.as_deref().and_then(|told| told.strip_suffix(", begun"));
        assert!(dies.is_none() || dies != thread.name(), "told to die");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_names_the_innermost_callback_and_keeps_its_message() {
        let error = caught("the place", || {
            call("outer", || call(format!("inner of {:?}", "vga"), || panic!("no {}", 7)));
        });
        let Err(MigrationError::Panicked { callback, message }) = error else { panic!("{error:?}") };
        assert_eq!((callback.as_str(), message.as_str()), ("inner of \"vga\"", "no 7"));
        let Err(MigrationError::Panicked { callback, .. }) = caught("the place", || panic!("plain")) else {
            panic!("caught nothing")
        };
        assert_eq!(callback, "the place", "the name of the panic before is forgotten");
        assert!(caught("all is well", || call("outer", || 7)).is_ok_and(|seven| seven == 7));
    }

    #[test]
    fn thread_that_dies_says_why() {
        let (sender, said) = std::sync::mpsc::channel();
        let thread = spawn("tern", || panic!("told to"), move |error| sender.send(error).unwrap()).unwrap();
        thread.join().unwrap();
        let said = said.recv().unwrap().to_string();
        assert!(said.contains("tern") && said.contains("told to"), "{said}");
    }

    #[test]
    fn parts_of_runs_are_all_of_them_and_each_page_once() {
        // One without pages is in no part, or in one with nothing to copy.
        let counts = [3, 0, 1, 10, 2];
        for share in 1..=17 {
            let mut copied = Vec::new();
            for start in (0..16).step_by(share) {
                let part = start..start + share as u64;
                let mut length = 0;
                for (run, skip, count) in in_part(&[0usize, 1, 2, 3, 4], part.clone(), |run| counts[*run]) {
                    copied.extend((skip..skip + count).map(|page| (*run, page)));
                    length += count;
                }
                assert_eq!(length, part.end.min(16) - start, "{part:?}");
            }
            let due = |run: usize| (0..counts[run]).map(move |page| (run, page));
            assert_eq!(copied, (0..5).flat_map(due).collect::<Vec<_>>(), "parts of {share}");
        }
    }

    #[test]
    fn observer_that_panics_is_told_so_and_no_more() {
        let told = std::sync::Mutex::new(Vec::new());
        let observer = |event: &Event| {
            told.lock().unwrap().push(event.clone());
            if !matches!(event, Event::Warning(_)) {
                panic!("told to");
            }
        };
        tell(&observer, &Event::Prepared);
        let told = told.lock().unwrap();
        assert!(matches!(&told[..], [Event::Prepared, Event::Warning(_)]), "{told:?}");
    }
}
