//! Turns a panic of a VMM's callback into that callback's error, and reports when an engine thread dies.
//!
//! No code outside the engine can undo the steps of a migration. If an engine thread died silently, the guest would
//! stay stopped, and no limit would end that. Therefore [`spawn`] starts every thread of the engine and reports why
//! it died. The threads that perform a handover machine's actions catch a panic of each action separately
//! ([`caught`]), so that the undo steps run after it. [`call`] records the callback's name for the error.
//!
//! This needs a program that unwinds (`panic = "unwind"`). With `panic = "abort"` the process ends, and its guest
//! with it.

use std::any::Any;
use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use sterna_ram::engine_lock::assert_none_held;
use sterna_ram::threads::{HookPanicked, message_of};
pub use sterna_ram::threads::{NewThread, OnThreadStart, ThreadRole, hooked};

use crate::error::MigrationError;
use crate::events::{Event, Observer};

/// From this number of pages on, an additional copying thread is faster, although it must be started.
const COPIED_BY_A_THREAD: u64 = 1024;
/// More threads do not copy faster, because memory bandwidth is the limit.
const MOST_COPYING: u64 = 4;

thread_local! {
    /// The callback that raised the panic which unwinds this thread now.
    static PANICKED: RefCell<Option<Cow<'static, str>>> = const { RefCell::new(None) };
}

/// Marks that this thread is inside that callback, until it is dropped.
struct Calling(Cow<'static, str>);

impl Drop for Calling {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Unwinding drops the innermost value first, so the first name is the callback that panicked.
            PANICKED.with_borrow_mut(|name| {
                name.get_or_insert_with(|| std::mem::take(&mut self.0));
            });
        }
    }
}

/// Calls the VMM and records the callback's name for a panic: `Device::save of "vga"`.
pub fn call<T>(callback: impl Into<Cow<'static, str>>, act: impl FnOnce() -> T) -> T {
    let callback = callback.into();
    assert_none_held(&callback);
    let _inside = Calling(callback);
    act()
}

/// Runs `act` and returns a panic as an error. The error names the callback that panicked, or else `place`.
///
/// Code that continues after an error must not rely on the values that `act` was about to change. The engine's locks
/// stay usable: a panic does not poison them, and each is held for whole changes only.
pub fn caught<T>(place: &str, act: impl FnOnce() -> T) -> Result<T, MigrationError> {
    assert_none_held(place);
    PANICKED.take();
    catch_unwind(AssertUnwindSafe(act)).map_err(|panic| panicked(place, &*panic))
}

/// The error for a panic of `place`, or of the callback that it called. Not generic, so that it is compiled once.
fn panicked(place: &str, panic: &(dyn Any + Send)) -> MigrationError {
    let callback = PANICKED.take().map_or_else(|| place.to_owned(), Cow::into_owned);
    let error =
        of_hook(panic).unwrap_or_else(|| MigrationError::Panicked { callback, message: message_of(panic) });
    tracing::error!("{error}");
    error
}

/// The error for a thread that ended because the VMM's hook for new threads panicked.
fn of_hook(panic: &(dyn Any + Send)) -> Option<MigrationError> {
    let HookPanicked { thread, message } = panic.downcast_ref()?;
    let callback = format!("Parameters::on_thread_start on the thread {thread:?}");
    Some(MigrationError::Panicked { callback, message: message.clone() })
}

/// The error for a thread whose join returned `panic`.
pub(crate) fn died(thread: &str, panic: &(dyn Any + Send)) -> MigrationError {
    of_hook(panic).unwrap_or_else(|| MigrationError::Internal(format!("{thread} panicked")))
}

/// Like [`caught`], for an `act` that returns a `Result`.
pub fn tried<T, E: Into<MigrationError>>(
    place: &str,
    act: impl FnOnce() -> Result<T, E>,
) -> Result<T, MigrationError> {
    caught(place, act)?.map_err(Into::into)
}

/// Calls `part` for ranges that together cover `0..pages`, in as many threads as are useful.
pub fn copied_in_parts(
    pages: u64,
    part: impl Fn(Range<u64>) -> Result<(), MigrationError> + Sync,
) -> Result<(), MigrationError> {
    let wanted = (pages / COPIED_BY_A_THREAD).clamp(1, MOST_COPYING);
    let threads = if wanted == 1 { 1 } else { wanted.min(sterna_ram::processors() as u64) };
    let share = pages.div_ceil(threads).max(1);
    let part = &|thread: u64| part(thread * share..(thread + 1) * share);
    std::thread::scope(|scope| {
        // If the host refuses a thread, this thread copies its part.
        let begun = |thread| {
            ThreadRole::CopyPages.of(thread).spawn_scoped(scope, move || part(thread)).map_err(|_| thread)
        };
        let others: Vec<_> = (1..threads).map(begun).collect();
        let mut done = part(0);
        for other in others {
            done = done.and(match other {
                Ok(other) => {
                    other.join().unwrap_or_else(|panic| Err(died("a thread that copies pages", &*panic)))
                }
                Err(thread) => part(thread),
            });
        }
        done
    })
}

/// Runs `act` for each number below `count`, at most `most` at the same time. Returns the results in order.
///
/// After the first error no further call is started, and `failed` must end the calls that are running.
pub(crate) fn side_by_side<T: Send, E: Send>(
    count: usize,
    most: usize,
    act: impl Fn(usize) -> Result<T, E> + Sync,
    failed: impl Fn() + Sync,
) -> Result<Vec<T>, E> {
    let (next, first_error) = (AtomicUsize::new(0), Mutex::new(None));
    let done: Mutex<Vec<Option<T>>> = Mutex::new((0..count).map(|_| None).collect());
    let work = || {
        while first_error.lock().is_none() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            match act(number) {
                Ok(result) => done.lock()[number] = Some(result),
                Err(error) => {
                    first_error.lock().get_or_insert(error);
                    failed();
                }
            }
        }
    };
    std::thread::scope(|scope| {
        // If the host refuses a thread, the other threads and this one do its work.
        let start = |number| ThreadRole::Connect.of(number).spawn_scoped(scope, work).ok();
        let others: Vec<_> = (1..most.min(count)).filter_map(start).collect();
        work();
        let panic = others.into_iter().filter_map(|other| other.join().err()).reduce(|first, _| first);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    });
    match first_error.into_inner() {
        Some(error) => Err(error),
        // Every number has a result: without an error only a panic could skip one, and it was propagated.
        None => Ok(done.into_inner().into_iter().flatten().collect()),
    }
}

/// The items that overlap `pages`, when all items' pages are numbered one after the other. For each: the item, the
/// number of its pages to skip, and the number of pages that follow.
pub fn in_part<T>(
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

/// Calls `observer`. If it panics, it gets a warning; the migration continues, because the observer must not stop it.
pub(crate) fn tell(observer: &dyn Observer, event: &Event) {
    let told = |event: &Event| caught("Observer::event", || observer.event(event));
    if let Err(error) = told(event) {
        let _ = told(&Event::Warning(format!("{error}, at {event:?}; the migration continues")));
    }
}

/// Starts a thread. If the thread or the VMM's hook panics, it calls `died` last.
///
/// # Errors
/// The operating system cannot create the thread.
pub fn spawn(
    thread: impl Into<NewThread>,
    work: impl FnOnce() + Send + 'static,
    died: impl FnOnce(MigrationError) + Send + 'static,
) -> Result<JoinHandle<()>, MigrationError> {
    start(thread.into(), Box::new(work), Box::new(died))
}

/// As [`spawn`]. Not generic: the standard library's part of a thread would be compiled for each caller.
fn start(
    thread: NewThread,
    work: Box<dyn FnOnce() + Send>,
    died: Box<dyn FnOnce(MigrationError) + Send>,
) -> Result<JoinHandle<()>, MigrationError> {
    let name = thread.name().to_owned();
    let refused = |why: std::io::Error| MigrationError::system(format!("thread {name:?}: {why}"), why);
    #[cfg(feature = "planted-faults")]
    let planted = planted::of_this_thread();
    #[cfg(feature = "planted-faults")]
    if planted.as_deref() == Some(&*name) {
        return Err(refused(std::io::Error::other("told to fail")));
    }
    let place = format!("the engine's thread {name:?}");
    let (builder, first) = thread.prepare();
    let thread = builder.spawn(move || {
        #[cfg(feature = "planted-faults")]
        planted::refuse_threads(planted.as_deref());
        let work = || {
            first.call();
            #[cfg(feature = "planted-faults")]
            planted::die_if_told();
            work();
        };
        if let Err(error) = caught(&place, work) {
            died(error);
        }
    });
    thread.map_err(refused)
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

    /// Refuses threads of that name to this thread, and to the threads that it starts directly or indirectly.
    /// With `, begun` after the name the thread is started, and dies immediately.
    pub fn refuse_threads(named: Option<&str>) {
        REFUSED.set(named.map(str::to_owned));
    }

    /// Every started thread calls this first.
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
    fn results_side_by_side_are_in_order_and_none_is_begun_after_an_error() {
        let (now, most, ends) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let act = |number: usize| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_millis(20));
            now.fetch_sub(1, Ordering::SeqCst);
            if number == 40 { Err("the fortieth") } else { Ok(number) }
        };
        let failed = || {
            ends.fetch_add(1, Ordering::SeqCst);
        };

        assert_eq!(side_by_side(20, 8, act, failed), Ok((0..20).collect()));
        assert!((2..=8).contains(&most.load(Ordering::SeqCst)), "{most:?}");
        assert_eq!(side_by_side(1000, 8, act, failed), Err("the fortieth"));
        assert_eq!(ends.load(Ordering::SeqCst), 1);
        assert_eq!(side_by_side(0, 8, act, failed), Ok(vec![]));
    }

    #[test]
    fn thread_that_dies_says_why() {
        let (sender, said) = std::sync::mpsc::channel();
        let panics = || panic!("told to");
        let thread = spawn(ThreadRole::Lane.of(7), panics, move |error| sender.send(error).unwrap()).unwrap();
        thread.join().unwrap();
        let said = said.recv().unwrap().to_string();
        assert!(said.contains("lane 7") && said.contains("told to"), "{said}");
    }

    #[test]
    fn hook_that_panics_on_a_helper_is_the_error_of_the_work() {
        let hook: OnThreadStart = std::sync::Arc::new(|_| panic!("told to"));
        let in_parallel = || {
            hooked(Some(&hook), || tried("the place", || side_by_side(2, 2, Ok::<_, MigrationError>, || ())))
        };
        let MigrationError::Panicked { callback, message } = in_parallel().unwrap_err() else {
            panic!("another error")
        };
        assert!(callback.contains("on_thread_start") && callback.contains("connect 1"), "{callback}");
        assert_eq!(message, "told to");
    }

    #[test]
    fn parts_of_runs_are_all_of_them_and_each_page_once() {
        // A run without pages is in no part, or in a part with no page to copy.
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
