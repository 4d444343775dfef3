//! Migrations where `/proc`, `/dev` and other paths are out of reach.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules,
};
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use sterna::ram::dirty::{DirtySource, UffdDirtyLog};
use sterna::ram::missing_pages::MissingPages;
use sterna::ram::{
    Backing, DirtyError, GuestRam, PAGE_SIZE, RamBlock, RamError, keep_pagemap, keep_userfaultfd,
};
use sterna::{Address, Capabilities, Direct, Incoming, Outcome, SettingLimits, SharedSettings, TargetVm};
use sterna_guests::process::ProcessGuest;

use crate::child::{is_child, is_root, skipped};
use crate::common::{Log, parameters};
use crate::scenes::{Here, Place, Scene, Stage, address, listen, moved, start};
use crate::support::{TestVm, eventually, has_warning, small};

/// The user and group `nobody`.
const NOBODY: u32 = 65534;

/// Forbids this thread, and the threads that it starts, every path outside of the stage.
fn lock_by_landlock(stage: &Stage) -> bool {
    let rights = AccessFs::from_all(ABI::V5);
    let ruleset = Ruleset::default().handle_access(rights).unwrap().create().unwrap();
    let ruleset = ruleset.add_rules(path_beneath_rules([&stage.directory], rights)).unwrap();
    ruleset.restrict_self().unwrap().ruleset != RulesetStatus::NotEnforced
}

fn lock_by_chroot(stage: &mut Stage) {
    std::os::unix::fs::chroot(&stage.directory).unwrap();
    std::env::set_current_dir("/").unwrap();
    stage.is_root_now();
}

/// Gives up all rights, as a VMM does that was started by root.
fn become_nobody(stage: &Stage) {
    std::fs::set_permissions(&stage.directory, PermissionsExt::from_mode(0o777)).unwrap();
    // SAFETY: no pointers are passed; glibc changes all threads.
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
        assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
    }
}

/// Moves a guest in each way that needs no right. Returns the source's warnings about the page table for each.
fn every_way_works(stage: &Stage) -> Vec<(Scene, Vec<String>)> {
    let ways = [
        Scene::new("tcp", Place::Tcp),
        Scene::new("tcp-anonymous", Place::Tcp).anonymous(),
        Scene::new("multifd-anonymous", Place::Tcp).multifd().anonymous(),
        Scene::new("tls", Place::Tcp).tls().multifd(),
        Scene::new("unix", Place::Unix).multifd().streams(),
        Scene::new("same-host", Place::Unix).same_host(),
        Scene::new("file", Place::File),
        Scene::new("mapped", Place::File).mapped(Direct::Off),
        Scene::new("mapped-anonymous", Place::File).mapped(Direct::Wanted).multifd().anonymous(),
    ];
    ways.map(|scene| {
        let [mut warnings, _] = moved(&scene, stage);
        // Others are about direct I/O, which some file systems refuse, and about the speed of this machine.
        warnings.retain(|text| text.contains("keep_pagemap"));
        (scene, warnings)
    })
    .into()
}

/// Each migration of private memory warns once, and no other one does.
fn assert_warned_once(ways: Vec<(Scene, Vec<String>)>) {
    for (scene, warnings) in ways {
        let is_warned = scene.backing == Backing::Anonymous;
        assert_eq!(warnings.len(), usize::from(is_warned), "{}: {warnings:?}", scene.name);
    }
}

fn assert_not_warned(ways: Vec<(Scene, Vec<String>)>) {
    for (scene, warnings) in ways {
        assert_eq!(warnings, [] as [&str; 0], "{}", scene.name);
    }
}

fn private_ram() -> GuestRam {
    let bytes = 1024 * PAGE_SIZE as u64;
    GuestRam::new(vec![RamBlock::new("ram", bytes, Backing::Anonymous).unwrap()]).unwrap()
}

fn absent_pages(ram: &GuestRam) -> u64 {
    let absent = sterna::ram::PageBitmap::new(1024);
    ram.block(0).mark_absent(0, 1024, &absent).unwrap();
    absent.count()
}

/// Nothing is known about private pages, and what cannot work without them is refused with the remedy.
fn assert_page_table_is_out_of_reach() {
    let ram = private_ram();
    assert_eq!(absent_pages(&ram), 0);
    assert_eq!(ram.block(0).resident_bytes().unwrap(), ram.block(0).len_bytes());
    assert!(matches!(ram.check_page_table(), Err(RamError::PageTable { .. })));
    let shared = RamBlock::new("ram", PAGE_SIZE as u64, Backing::Memfd).unwrap();
    assert!(GuestRam::new(vec![shared]).unwrap().check_page_table().is_ok(), "a memfd knows its holes");
    ram.block(0).zero_pages(0, 1024).expect("every page is compared");
    assert!(keep_pagemap().is_err());
    assert!(!UffdDirtyLog::is_supported());
    let refused = UffdDirtyLog::new(ram).start().unwrap_err();
    let is_named = matches!(refused, DirtyError::Unsupported { what, .. } if what.contains("keep_pagemap"));
    assert!(is_named || !is_userfaultfd_there(), "{refused}");
}

fn is_userfaultfd_there() -> bool {
    // SAFETY: no pointers are passed. The descriptor ends with the process.
    unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) >= 0 }
}

/// The page table is known by the kept descriptor, also to the log.
fn assert_page_table_is_kept() {
    let ram = private_ram();
    assert_eq!(absent_pages(&ram), 1024);
    ram.check_page_table().unwrap();
    ram.block(0).write(0, &[1]).unwrap();
    assert!(absent_pages(&ram) < 1024);
    keep_pagemap().expect("it is kept already");
    if UffdDirtyLog::is_supported() {
        let log = UffdDirtyLog::new(ram.clone());
        log.start().unwrap();
        let mut found = sterna::ram::DirtyBitmaps::new(&ram);
        log.sync(&mut found).unwrap();
        ram.block(0).write(5 * PAGE_SIZE as u64, &[1]).unwrap();
        log.sync(&mut found).unwrap();
        assert!(found.block(0).get(5));
    }
}

/// Postcopy's destination refuses to listen and names the remedy; the guest was not touched.
fn assert_postcopy_is_refused(stage: &Stage) {
    let scene = Scene::new("postcopy", Place::Tcp).postcopy();
    let (target, at) = (ProcessGuest::waiting(small()).unwrap(), address(&scene, stage));
    let Err(refused) = listen((&scene, stage, &Here), target, &at, &Arc::new(Log::default())) else {
        panic!("postcopy without a right to it");
    };
    let text = refused.to_string();
    assert!(text.contains("/dev/userfaultfd"), "{text}");

    // Without a VM, too, if the settings are this side's own.
    let make = |_: &[u8]| unreachable!("no source connects");
    let on = Capabilities { postcopy_ram: true, ..Capabilities::default() };
    let without_vm =
        Incoming::listen_with(&at, parameters(), on, SharedSettings::AsHere, Arc::new(()), make).err();
    assert_eq!(without_vm.map(|error| error.to_string()), Some(text));
}

/// A destination without a VM refuses a source with postcopy, and both sides learn the remedy.
fn assert_source_with_postcopy_is_refused(stage: &Stage) {
    let scene = Scene::new("configured-postcopy", Place::Tcp).postcopy();
    let (at, log) = (address(&scene, stage), Arc::new(Log::default()));
    let make = |_: &[u8]| unreachable!("the source does not fit");
    let (shared, on) = (SharedSettings::AsSource(SettingLimits::default()), Capabilities::default());
    let incoming = Incoming::listen_with(&at, parameters(), on, shared, log.clone(), make).unwrap();
    let source = TestVm::new(ProcessGuest::boot(small()).unwrap());
    *source.configuration.lock().unwrap() = Some(b"small".to_vec());

    let outcome =
        start((&scene, stage, &Here), source, &incoming.address(), &Arc::new(Log::default())).wait();

    let Outcome::Failed { error, held: false } = outcome else { panic!("{outcome:?}") };
    let text = error.to_string();
    assert!(text.contains("postcopy-ram") && text.contains("/dev/userfaultfd"), "{text}");
    eventually("the warning", || has_warning(&log.events(), &["/dev/userfaultfd"]));
}

/// A socket's path that is too long for an address is reached through `/proc`. The error says that it is missing.
fn assert_long_paths_are_refused(stage: &Stage) {
    let directory = stage.directory.join("d".repeat(100));
    std::fs::create_dir(&directory).unwrap();
    let at = Address::Unix(directory.join("socket"));
    let vm: Arc<dyn TargetVm> = ProcessGuest::waiting(small()).unwrap();
    let refused = Incoming::listen(vm, &at, parameters(), Capabilities::default(), Arc::new(())).err();
    assert!(refused.is_some_and(|error| error.to_string().contains("/proc")));
}

fn postcopy_works(stage: &Stage) {
    moved(&Scene::new("postcopy", Place::Tcp).postcopy(), stage);
    moved(&Scene::new("postcopy-anonymous", Place::Tcp).postcopy().multifd().anonymous(), stage);
}

#[test]
fn landlock_without_proc_moves_guests_every_way_and_warns_once() {
    if !is_child() {
        return;
    }
    let stage = Stage::new();
    if !lock_by_landlock(&stage) {
        return skipped("landlock_without_proc_moves_guests_every_way_and_warns_once", "no Landlock");
    }
    assert_eq!(std::fs::read("/proc/self/pagemap").unwrap_err().raw_os_error(), Some(libc::EACCES));

    assert_warned_once(every_way_works(&stage));
    assert_page_table_is_out_of_reach();
    if MissingPages::probe().is_ok() {
        postcopy_works(&stage);
    }
}

#[test]
fn landlock_with_a_kept_pagemap_finds_absent_pages() {
    if !is_child() {
        return;
    }
    let stage = Stage::new();
    keep_pagemap().unwrap();
    if !lock_by_landlock(&stage) {
        return skipped("landlock_with_a_kept_pagemap_finds_absent_pages", "no Landlock");
    }

    assert_not_warned(every_way_works(&stage));
    assert_page_table_is_kept();
}

#[test]
fn chroot_without_proc_moves_guests_every_way_and_warns_once() {
    if !is_child() {
        return;
    }
    if !is_root() {
        return skipped("chroot_without_proc_moves_guests_every_way_and_warns_once", "this needs root");
    }
    let mut stage = Stage::new();
    lock_by_chroot(&mut stage);
    assert_eq!(std::fs::read("/proc/self/pagemap").unwrap_err().raw_os_error(), Some(libc::ENOENT));

    assert_warned_once(every_way_works(&stage));
    assert_page_table_is_out_of_reach();
    postcopy_works(&stage);
    assert_long_paths_are_refused(&stage);
}

#[test]
fn chroot_with_a_kept_pagemap_finds_absent_pages() {
    if !is_child() {
        return;
    }
    if !is_root() {
        return skipped("chroot_with_a_kept_pagemap_finds_absent_pages", "this needs root");
    }
    let mut stage = Stage::new();
    keep_pagemap().unwrap();
    lock_by_chroot(&mut stage);

    assert_not_warned(every_way_works(&stage));
    assert_page_table_is_kept();
}

/// Refuses PAGEMAP_SCAN and io_uring with EPERM to this thread and the threads that it starts, and permits all other calls.
fn refuse_what_only_saves_time() {
    const PAGEMAP_SCAN: u64 = 0xc060_6610;
    let scan = SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, PAGEMAP_SCAN).unwrap();
    let rules = [
        (libc::SYS_ioctl, vec![SeccompRule::new(vec![scan]).unwrap()]),
        (libc::SYS_io_uring_setup, Vec::new()),
    ];
    let (others, these) = (SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32));
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules.into_iter().collect(), others, these, arch).unwrap();
    let program: seccompiler::BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

#[test]
fn seccomp_that_refuses_with_eperm_moves_guests_every_way_and_warns_once() {
    if !is_child() {
        return;
    }
    let stage = Stage::new();
    refuse_what_only_saves_time();

    assert_warned_once(every_way_works(&stage));
    let ram = private_ram();
    assert_eq!(absent_pages(&ram), 0);
    assert!(matches!(UffdDirtyLog::new(ram).start(), Err(DirtyError::Unsupported { .. })));
}

/// Whether a user without rights may not block the kernel's accesses, as Linux sets it.
fn is_userfaultfd_privileged() -> bool {
    std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|text| text.trim() == "0")
}

#[test]
fn user_without_rights_moves_guests_and_is_refused_postcopy_by_name() {
    if !is_child() {
        return;
    }
    let stage = Stage::new();
    let is_privileged = is_userfaultfd_privileged();
    if !is_root() {
        return skipped(
            "user_without_rights_moves_guests_and_is_refused_postcopy_by_name",
            "this needs root",
        );
    }
    become_nobody(&stage);
    // A process that has changed its user owns none of its files in /proc.
    assert_eq!(std::fs::read("/proc/self/pagemap").unwrap_err().raw_os_error(), Some(libc::EACCES));

    assert_warned_once(every_way_works(&stage));
    assert_page_table_is_out_of_reach();
    if is_privileged {
        assert_postcopy_is_refused(&stage);
        assert_source_with_postcopy_is_refused(&stage);
    }
}

#[test]
fn user_without_rights_with_kept_descriptors_has_every_feature() {
    if !is_child() {
        return;
    }
    let stage = Stage::new();
    if !is_root() {
        return skipped("user_without_rights_with_kept_descriptors_has_every_feature", "this needs root");
    }
    if let Err(error) = keep_userfaultfd() {
        return skipped("user_without_rights_with_kept_descriptors_has_every_feature", error);
    }
    keep_pagemap().unwrap();
    become_nobody(&stage);

    assert_not_warned(every_way_works(&stage));
    assert_page_table_is_kept();
    postcopy_works(&stage);
}

#[test]
fn kept_pagemap_is_the_parents_so_a_forked_child_opens_its_own() {
    if !is_child() {
        return;
    }
    keep_pagemap().unwrap();
    let before = private_ram();
    assert_eq!(absent_pages(&before), 1024);
    // SAFETY: no other thread of this process holds a lock that the child needs: the harness only waits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        (0..1024).for_each(|page| before.block(0).write(page * PAGE_SIZE as u64, &[1]).unwrap());
        let right = absent_pages(&before) == 0;
        // SAFETY: ends the child without the exit handlers of the test harness.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = 0;
    // SAFETY: `status` is a live int, and the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child read its parent's page table");
    assert_eq!(absent_pages(&before), 1024);
}

#[test]
fn kept_pagemap_whose_number_names_another_file_is_opened_again() {
    if !is_child() {
        return;
    }
    keep_pagemap().unwrap();
    // Behaves like a daemon that closes all descriptors and opens others.
    let number = std::fs::read_dir("/proc/self/fd").unwrap().flatten().find_map(|entry| {
        let to = std::fs::read_link(entry.path()).ok()?;
        to.ends_with("pagemap").then(|| entry.file_name().to_str().unwrap().parse::<i32>().unwrap())
    });
    let zeros = std::fs::File::open("/dev/zero").unwrap();
    // SAFETY: no pointers are passed, and only this test knows the number.
    let done = unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&zeros), number.expect("it is open")) };
    assert!(done >= 0);
    let ram = private_ram();
    (0..1024).for_each(|page| ram.block(0).write(page * PAGE_SIZE as u64, &[1]).unwrap());

    assert_eq!(absent_pages(&ram), 0, "zeros were read as the page table");
}
