//! A chroot, a user without rights, and Landlock.

use std::error::Error;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus, path_beneath_rules,
};
use rustix::process::geteuid;

/// The user and group `nobody`.
const NOBODY: u32 = 65534;

/// Leaves this process only the paths in `directory`. Returns the names of the locks.
///
/// Only root can change the root directory and the user.
pub fn lock(directory: &Path) -> Result<String, Box<dyn Error>> {
    let mut locks = Vec::new();
    let mut root = directory;
    if geteuid().is_root() {
        std::os::unix::fs::chroot(directory)?;
        root = Path::new("/");
        locks.push("chroot");
    }
    std::env::set_current_dir(root)?;
    if geteuid().is_root() {
        become_nobody()?;
        locks.push("user");
    }
    let rights = AccessFs::from_all(ABI::V5);
    let ruleset = Ruleset::default().handle_access(rights)?.create()?;
    let status = ruleset.add_rules(path_beneath_rules([root], rights))?.restrict_self()?;
    if status.ruleset != RulesetStatus::NotEnforced {
        locks.push("landlock");
    }
    Ok(locks.join(", "))
}

/// Gives up all rights. No other thread exists yet.
fn become_nobody() -> Result<(), Box<dyn Error>> {
    use rustix::thread::{Gid, Uid};
    let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(group, group, group)?;
    Ok(rustix::thread::set_thread_res_uid(user, user, user)?)
}
