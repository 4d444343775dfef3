//! Checkpoints in flight to a standby that receives nothing. The guest runs, and its output waits.

use sterna_drive::protect::QemuProtection;
use sterna_interop::{Failure, Root};
use sterna_standby::machines::primary::{Because, Outcome};

use super::lab::{Lab, Side, wait, wins};

/// A number of bytes that is larger than a REQUEST and smaller than a checkpoint.
const IN_CHECKPOINT_BYTES: u64 = 1 << 10;

/// Freezes the wire within a checkpoint. The guest runs, the next checkpoint is due, and no output is
/// released.
fn freeze(lab: &mut Lab, side: &Side, protection: &QemuProtection) -> Result<(), Failure> {
    side.wire.freeze_in_ram(IN_CHECKPOINT_BYTES);
    wait("the frozen wire", || side.wire.is_frozen().then_some(()))?;
    lab.network.hear_out()?;
    let (heard, waiting) = (lab.network.last, protection.statistics().output.waiting);
    wait("more output", || (protection.statistics().output.waiting > waiting + 40).then_some(()))?;
    assert_eq!(lab.primary.status()?, "running");
    lab.network.hear_out()?;
    assert_eq!(lab.network.last, heard, "nothing leaves that is not held");
    Ok(())
}

#[test]
fn guest_runs_while_its_checkpoint_is_on_its_way_and_is_heard_when_it_is_held() -> Result<(), Failure> {
    let test = "guest_runs_while_its_checkpoint_is_on_its_way_and_is_heard_when_it_is_held";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for channels in [0, 2] {
        let mut lab = Lab::talking(&root)?;
        let side = lab.standby(channels)?;
        let protection = lab.protect(&side, None, wins())?;
        lab.wait_until_held(&side, &protection, 5)?;

        freeze(&mut lab, &side, &protection)?;
        side.wire.thaw();
        lab.network.hear_more(60)?;
        let held = protection.statistics().held;
        lab.wait_until_held(&side, &protection, held + 3)?;
        assert_eq!(protection.statistics().waits_because, None);

        freeze(&mut lab, &side, &protection)?;
        lab.primary.kill();
        side.wire.cut();
        lab.network.hear_out()?;
        let held = side.take_over(&lab.directory.path().join("image"))?;
        assert!(held >= lab.network.last, "{held} is held, {} was heard", lab.network.last);
    }
    Ok(())
}

#[test]
fn guest_whose_standby_is_lost_with_a_checkpoint_on_its_way_goes_on_and_loses_no_packet()
-> Result<(), Failure> {
    let test = "guest_whose_standby_is_lost_with_a_checkpoint_on_its_way_goes_on_and_loses_no_packet";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let side = lab.standby(2)?;
    let protection = lab.protect(&side, None, wins())?;
    lab.wait_until_held(&side, &protection, 5)?;

    freeze(&mut lab, &side, &protection)?;
    side.wire.cut();
    let end = protection.finish().map_err(|error| error.to_string())?;

    assert_eq!(end.outcome, Outcome::Alone(Because::Claim));
    assert!(end.runs_here && end.left.is_empty(), "{end:?}");
    lab.network.hear_more(60)
}
