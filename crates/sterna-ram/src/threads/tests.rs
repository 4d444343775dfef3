use parking_lot::Mutex;

use super::*;

type Seen = Arc<Mutex<Vec<(ThreadRole, Option<String>)>>>;

fn recording() -> (OnThreadStart, Seen) {
    let seen = Seen::default();
    let theirs = Arc::clone(&seen);
    let hook = move |role| {
        let name = std::thread::current().name().map(str::to_owned);
        theirs.lock().push((role, name));
    };
    (Arc::new(hook), seen)
}

#[test]
fn thread_and_its_threads_run_the_hook_first_and_the_caller_keeps_its_own() {
    let (hook, seen) = recording();
    let theirs = Arc::clone(&seen);
    let work = move || {
        assert_eq!(theirs.lock().len(), 1, "the hook ran before");
        std::thread::scope(|scope| {
            ThreadRole::MergeDirty.of(7).spawn_scoped(scope, || ()).unwrap().join().unwrap();
        });
    };
    let thread = hooked(Some(&hook), || NewThread::from(ThreadRole::Migration).spawn(work));
    thread.unwrap().join().unwrap();
    assert!(super::hook().is_none(), "this thread is not Sterna's");
    NewThread::from(ThreadRole::Listener).spawn(|| ()).unwrap().join().unwrap();
    let expected = [(ThreadRole::Migration, "migration"), (ThreadRole::MergeDirty, "merge 7")];
    assert_eq!(*seen.lock(), expected.map(|(role, name)| (role, Some(name.to_owned()))));
}

#[test]
fn hook_that_panics_ends_the_thread_with_a_typed_panic_before_its_work() {
    let hook: OnThreadStart = Arc::new(|_| panic!("no filter"));
    let worked = Arc::new(Mutex::new(false));
    let theirs = Arc::clone(&worked);
    let thread = hooked(Some(&hook), || ThreadRole::Lane.of(1).spawn(move || *theirs.lock() = true));
    let panic = thread.unwrap().join().unwrap_err();
    let panic = panic.downcast_ref::<HookPanicked>().expect("typed");
    assert_eq!((panic.thread.as_str(), panic.message.as_str()), ("lane 1", "no filter"));
    assert!(!*worked.lock());
}

#[test]
fn names_of_roles_are_distinct() {
    let mut names: Vec<_> = ThreadRole::ALL.iter().map(|role| role.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), ThreadRole::ALL.len());
}
