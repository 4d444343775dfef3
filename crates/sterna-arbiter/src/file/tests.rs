use super::exclusive::Temporary;
use super::*;
use crate::claim::{Claimant, Role};

fn claim(process: &str, generation: u64) -> Claim {
    Claim {
        guest: GuestName::new("a/guest").expect("a name"),
        generation: Generation::new(generation),
        claimant: Claimant::new(Role::Standby, process).expect("a name"),
    }
}

fn lost(winner: &str) -> Ruling {
    Ruling::Lost { winner: Some(claim(winner, 1).claimant) }
}

struct Fixture {
    directory: tempfile::TempDir,
    arbiter: FileArbiter,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let arbiter = FileArbiter::new(directory.path());
        Self { directory, arbiter }
    }

    fn place(&self, of: &Claim) -> PathBuf {
        self.arbiter.path(&of.guest, of.generation)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path()).expect("listed");
        let mut names: Vec<String> =
            entries.map(|entry| entry.expect("listed").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

#[test]
fn first_wins_for_ever_in_its_generation() {
    let fixture = Fixture::new();

    for _ in 0..3 {
        assert_eq!(fixture.arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));
        assert_eq!(fixture.arbiter.claim(&claim("b", 1)), Ok(lost("a")));
        assert_eq!(fixture.arbiter.claim(&claim("b", 2)), Ok(Ruling::Won));
    }
    let names = fixture.names();
    assert_eq!(names.len(), 2, "nothing else is left: {names:?}");
    assert!(names[0].starts_with("a%2Fguest.1.claim"), "{names:?}");
}

#[test]
fn killed_after_each_step_leaves_a_state_that_decides() {
    let bytes = |of: &Claim| record::encode(of).into_bytes();

    // Killed before the link: no claimant has won.
    let fixture = Fixture::new();
    let written = Temporary::write(&fixture.place(&claim("a", 1)), &bytes(&claim("a", 1))).expect("written");
    std::mem::forget(written);
    assert_eq!(fixture.arbiter.claim(&claim("b", 1)), Ok(Ruling::Won));
    assert_eq!(fixture.arbiter.claim(&claim("a", 1)), Ok(lost("b")));

    // Killed in the middle of writing: no claimant has won.
    let fixture = Fixture::new();
    let half =
        Temporary::write(&fixture.place(&claim("a", 1)), &bytes(&claim("a", 1))[..20]).expect("written");
    std::mem::forget(half);
    assert_eq!(fixture.arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));

    // Killed after the link: the killed claimant has won.
    let fixture = Fixture::new();
    let place = fixture.place(&claim("a", 1));
    let linked = Temporary::write(&place, &bytes(&claim("a", 1))).expect("written");
    linked.publish(&place).expect("linked");
    std::mem::forget(linked);
    assert_eq!(fixture.arbiter.claim(&claim("b", 1)), Ok(lost("a")));
    assert_eq!(fixture.arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));
}

#[test]
fn claim_made_between_look_and_link_is_respected() {
    let fixture = Fixture::new();
    let place = fixture.place(&claim("a", 1));
    let late = Temporary::write(&place, record::encode(&claim("a", 1)).as_bytes()).expect("written");
    assert_eq!(fixture.arbiter.claim(&claim("b", 1)), Ok(Ruling::Won));

    let error = late.publish(&place).expect_err("the name is taken");

    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fixture.arbiter.claim(&claim("a", 1)), Ok(lost("b")));
}

#[test]
fn renaming_replaces_nothing_either() {
    let fixture = Fixture::new();
    let place = fixture.place(&claim("a", 1));
    let written = |who| Temporary::write(&place, record::encode(&claim(who, 1)).as_bytes()).expect("written");

    written("a").rename(&place).expect("renamed");
    let error = written("b").rename(&place).expect_err("the name is taken");

    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fixture.arbiter.claim(&claim("b", 1)), Ok(lost("a")));
    assert_eq!(fixture.names().len(), 1);
}

#[test]
fn directory_that_is_missing_or_no_directory_is_said() {
    let fixture = Fixture::new();
    std::fs::write(fixture.directory.path().join("file"), "").expect("written");

    for (place, what) in [("missing", "No such file"), ("file", "Not a directory")] {
        let arbiter = FileArbiter::new(&fixture.directory.path().join(place));
        let error = arbiter.claim(&claim("a", 1)).expect_err("no directory");
        assert!(!error.is_contradictory(), "{error}");
        assert!(
            error.to_string().contains(what) && error.to_string().contains("mount the storage"),
            "{error}"
        );
        arbiter.identity(&claim("a", 1).guest, Generation::new(1)).expect_err("no directory");
    }
}

#[test]
fn directory_that_cannot_be_written_to_is_said() {
    use std::os::unix::fs::PermissionsExt as _;

    let fixture = Fixture::new();
    let set = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(fixture.directory.path(), permissions).expect("changed");
    };
    set(0o555);
    let result = fixture.arbiter.claim(&claim("a", 1));
    set(0o755);

    if rustix::process::geteuid().is_root() {
        // Root may write to any directory, so the test uses a file system that no process can write to.
        let error = FileArbiter::new(Path::new("/proc")).claim(&claim("a", 1)).expect_err("not writable");
        assert!(!error.is_contradictory(), "{error}");
    } else {
        let error = result.expect_err("not writable");
        assert!(
            !error.is_contradictory() && error.to_string().contains("let this process create"),
            "{error}"
        );
    }
}

#[test]
fn what_is_torn_or_foreign_is_believed_by_nobody() {
    let whole = record::encode(&claim("a", 1));
    let other = record::encode(&claim("a", 2));
    let long = "x".repeat(record::MOST_BYTES + 1);
    for (content, what) in [
        (&whole[..30], "truncated"),
        ("", "empty"),
        ("hello", "not a claim of Sterna"),
        (&other, "another guest or generation"),
        (&long, "longer than"),
    ] {
        let fixture = Fixture::new();
        std::fs::write(fixture.place(&claim("a", 1)), content).expect("written");

        for who in ["a", "b"] {
            let error = fixture.arbiter.claim(&claim(who, 1)).expect_err("must not start on either side");
            assert!(error.is_contradictory() && error.to_string().contains(what), "{error}");
        }
    }
}

#[test]
fn what_is_no_file_is_believed_by_nobody() {
    let make: [fn(&Path); 3] = [
        |place| std::fs::create_dir(place).expect("made"),
        |place| std::os::unix::fs::symlink("elsewhere", place).expect("made"),
        |place| {
            let mode = rustix::fs::Mode::from_bits_retain(0o644);
            rustix::fs::mknodat(rustix::fs::CWD, place, rustix::fs::FileType::Fifo, mode, 0).expect("made");
        },
    ];
    for make in make {
        let fixture = Fixture::new();
        make(&fixture.place(&claim("a", 1)));

        let error = fixture.arbiter.claim(&claim("a", 1)).expect_err("must not start on either side");

        assert!(error.is_contradictory(), "{error}");
    }
}

#[test]
fn directories_have_a_token_for_each_generation_until_it_is_forgotten() {
    let (one, other) = (Fixture::new(), Fixture::new());
    let identity =
        |of: &Fixture, generation| of.arbiter.identity(&claim("a", 1).guest, Generation::new(generation));

    let first = identity(&one, 1).expect("a token");

    assert!(matches!(first, Identity::Is(_)));
    assert_eq!(identity(&one, 1), Ok(first.clone()), "the other side reads it");
    assert_ne!(identity(&other, 1), Ok(first.clone()), "another directory");
    assert_ne!(identity(&one, 2), Ok(first.clone()), "another generation");
    let guest = claim("a", 1).guest;
    one.arbiter.forget_identity(&guest, Generation::new(1));
    one.arbiter.forget_identity(&guest, Generation::new(2));
    assert_eq!(one.names(), Vec::<String>::new());
    one.arbiter.forget_identity(&guest, Generation::new(2));
    std::fs::write(one.arbiter.token_path(&guest, Generation::new(1)), "sterna-arbiter 1 x\n")
        .expect("written");
    assert!(identity(&one, 1).expect_err("foreign").is_contradictory());
}

#[test]
fn copied_directory_is_another_arbiter() {
    // The copy contains every earlier claim, as after a wrong mount or with a replication that lags.
    let (one, copy) = (Fixture::new(), Fixture::new());
    assert_eq!(one.arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));
    for name in one.names() {
        std::fs::copy(one.directory.path().join(&name), copy.directory.path().join(&name)).expect("copied");
    }
    let identity = |of: &Fixture| of.arbiter.identity(&claim("a", 1).guest, Generation::new(2));

    assert_ne!(identity(&one).expect("a token"), identity(&copy).expect("a token"));
}

#[test]
fn full_disk_is_said_and_leaves_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let Some(disk) = SmallDisk::mount(directory.path()) else { return };
    let filler = disk.0.join("filler");
    // The write fails when the disk is full.
    let _ = std::fs::write(&filler, vec![1; 1 << 20]);
    let arbiter = FileArbiter::new(disk.0);

    let error = arbiter.claim(&claim("a", 1)).expect_err("no space");

    assert!(!error.is_contradictory() && error.to_string().contains("free space"), "{error}");
    assert_eq!(std::fs::read_dir(disk.0).expect("listed").count(), 1);
    std::fs::remove_file(filler).expect("removed");
    assert_eq!(arbiter.claim(&claim("b", 1)), Ok(Ruling::Won));
}

/// A separate file system, unmounted when it is dropped.
struct SmallDisk<'a>(&'a Path);

impl<'a> SmallDisk<'a> {
    fn mount(directory: &'a Path) -> Option<Self> {
        let mut command = std::process::Command::new("mount");
        command.args(["-t", "tmpfs", "-o", "size=65536", "tmpfs"]).arg(directory);
        if command.stderr(std::process::Stdio::null()).status().is_ok_and(|status| status.success()) {
            return Some(Self(directory));
        }
        use std::io::Write as _;
        // Written directly to stderr: libtest captures `eprintln!`, and xtask must see the line.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED full_disk_is_said_and_leaves_nothing: no right to mount a file system"
        );
        None
    }
}

impl Drop for SmallDisk<'_> {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0).status();
    }
}
