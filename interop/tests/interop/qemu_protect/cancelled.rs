//! `migrate_cancel` on a protected QEMU, and a `sterna protect` that is killed within a checkpoint. QEMU
//! refuses `cont` while its guest is paused for a checkpoint of a cancelled migration.

use serde_json::{Value, json};
use sterna_interop::{Failure, Root, sterna_does};

use super::command::Protect;
use super::lab::{Lab, Side, wait};
use super::settings;

/// A number of bytes that is larger than a REQUEST and smaller than a checkpoint.
const IN_CHECKPOINT_BYTES: u64 = 1 << 10;

/// With these arguments, the guest stays paused until the standby has answered.
const STANDS: [&str; 2] = ["--lease=600s", "--checkpoint-buffer=0M"];

/// Freezes the wire within a checkpoint, so that QEMU's guest stays paused there.
fn stop_in_checkpoint(lab: &mut Lab, side: &Side) -> Result<(), Failure> {
    side.wire.freeze_in_ram(IN_CHECKPOINT_BYTES);
    wait("the frozen wire", || side.wire.is_frozen().then_some(()))?;
    lab.primary.wait_for_status("colo")
}

fn cancel_in_checkpoint(lab: &mut Lab) -> Result<(), Failure> {
    lab.primary.execute("migrate_cancel", Value::Null)?;
    let refused = lab.primary.resume().unwrap_err();
    assert!(refused.contains("COLO checkpoint in progress"), "{refused}");
    Ok(())
}

/// Checks that the guest runs and sends frames, and that no gate is left.
fn runs_without_gates(lab: &mut Lab) -> Result<(), Failure> {
    lab.primary.wait_for_status("running")?;
    lab.network.hear_more(20)?;
    for settings in settings(&mut lab.primary)? {
        assert!(!settings.to_string().contains("sterna-gate"), "{settings}");
    }
    Ok(())
}

#[test]
fn guest_of_a_cancelled_qemu_runs_on_in_and_between_checkpoints() -> Result<(), Failure> {
    let test = "guest_of_a_cancelled_qemu_runs_on_in_and_between_checkpoints";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for is_inside in [false, true] {
        let mut lab = Lab::talking(&root)?;
        let [_, parameters, ..] = settings(&mut lab.primary)?;
        let side = lab.standby(0)?;
        let mut protect = Protect::start(&lab, &side, &STANDS)?;
        protect.until_protected()?;

        if is_inside {
            stop_in_checkpoint(&mut lab, &side)?;
            cancel_in_checkpoint(&mut lab)?;
            // The protection needs the standby's last message.
            side.wire.thaw();
        } else {
            lab.primary.parameters(json!({"x-checkpoint-delay": 600_000}))?;
            lab.primary.wait_for_status("running")?;
            lab.primary.execute("migrate_cancel", Value::Null)?;
        }

        let end = protect.line(|line| line["state"] == "alone")?;
        assert_eq!(end["runs_here"], true, "{end}");
        let left = end["left"].to_string();
        assert!(left.contains("accepts no capability") && !left.contains("gates"), "{left}");
        assert_eq!(protect.end()?.code(), Some(1));
        runs_without_gates(&mut lab)?;
        assert_eq!(settings(&mut lab.primary)?[1], parameters);
    }
    Ok(())
}

#[test]
fn unprotect_starts_the_guest_of_a_protection_that_was_killed_in_a_checkpoint() -> Result<(), Failure> {
    let test = "unprotect_starts_the_guest_of_a_protection_that_was_killed_in_a_checkpoint";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for is_cancelled in [false, true] {
        let mut lab = Lab::talking(&root)?;
        // The protection switches this capability on. It cannot know later whether another client needs it,
        // so it stays on.
        lab.primary.capabilities(&["events"])?;
        let before = settings(&mut lab.primary)?;
        let side = lab.standby(0)?;
        let mut protect = Protect::start(&lab, &side, &STANDS)?;
        protect.until_protected()?;
        stop_in_checkpoint(&mut lab, &side)?;
        drop(protect);
        side.wire.cut();
        if is_cancelled {
            cancel_in_checkpoint(&mut lab)?;
        }

        let qemu = format!("unix:{}", lab.primary.operator_socket().display());
        sterna_does(&["unprotect", &qemu, "--vouch"])?;

        // Output that the killed program held back is lost.
        lab.network.forget();
        runs_without_gates(&mut lab)?;
        if is_cancelled {
            continue;
        }
        let after = settings(&mut lab.primary)?;
        assert_eq!(after[0], before[0], "capabilities");
        assert_eq!(after[2..], before[2..], "objects and character devices");
        let side = lab.standby(0)?;
        let mut protect = Protect::start(&lab, &side, &["--lease=600s"])?;
        protect.until_protected()?;
        sterna_does(&["unprotect", &protect.socket])?;
        assert_eq!(protect.end()?.code(), Some(0));
        lab.network.hear_more(20)?;
    }
    Ok(())
}
