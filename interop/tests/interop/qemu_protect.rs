//! An unmodified QEMU as the primary of a protection. Its guest's output is released only after its
//! checkpoint is held. `specs/replica.md` defines which side may run the guest.

mod cancelled;
mod command;
mod disks;
mod kept;
mod lab;
mod order;
mod unfenced;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_arbiter::{Claim, Claimant, Generation, GuestName, Role, Spec};
use sterna_drive::protect::ProtectRequest;
use sterna_interop::{Failure, Guest, Qemu, Root};
use sterna_standby::Claims;
use sterna_standby::machines::Ruling;
use sterna_standby::machines::primary::{Because, Cause, Outcome};
use sterna_testing::stretched;
use sterna_transport::{Tls, TlsCredentials, TlsEndpoint};

use crate::certificates::good_directory;
use lab::{Lab, wait, wins};

/// The settings of a QEMU that an operator can see.
fn settings(primary: &mut Qemu) -> Result<[Value; 4], Failure> {
    let mut devices = primary.execute("query-chardev", Value::Null)?;
    for device in devices.as_array_mut().into_iter().flatten() {
        // QEMU writes the state of the client's connection here, and notices a disconnection only after some
        // time.
        let name = device["filename"].as_str().unwrap_or_default();
        device["filename"] = json!(name.strip_prefix("disconnected:").unwrap_or(name));
    }
    Ok([
        primary.execute("query-migrate-capabilities", Value::Null)?,
        primary.execute("query-migrate-parameters", Value::Null)?,
        primary.execute("qom-list", json!({"path": "/objects"}))?,
        devices,
    ])
}

#[test]
fn output_leaves_only_when_its_checkpoint_is_held() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("output_leaves_only_when_its_checkpoint_is_held") else { return Ok(()) };
    for channels in [0, 2] {
        let mut lab = Lab::talking(&root)?;
        let side = lab.standby(channels)?;
        let protection = lab.protect(&side, None, wins())?;
        lab.wait_until_held(&side, &protection, 5)?;
        lab.network.hear_more(20)?;

        // From here on, the standby holds further checkpoints without reporting it.
        side.tells.store(protection.statistics().held, Ordering::SeqCst);
        lab.network.hear_out()?;
        let waiting = protection.statistics().output.waiting;
        wait("more output", || (protection.statistics().output.waiting > waiting + 5).then_some(()))?;
        let heard = lab.network.last;
        lab.network.hear_out()?;
        assert_eq!(lab.network.last, heard, "nothing leaves that is not held");

        side.tells.store(u64::MAX, Ordering::SeqCst);
        lab.network.hear_more(20)?;
        let now = protection.statistics();
        assert!(now.pauses > 5 && now.pause_p50.is_some() && now.stream_bytes > 0, "{now:?}");

        lab.primary.kill();
        lab.network.hear_out()?;
        let held = side.take_over(&lab.directory.path().join("image"))?;
        assert!(held >= lab.network.last, "{held} is held, {} was heard", lab.network.last);
    }
    Ok(())
}

#[test]
fn unprotecting_loses_no_packet_and_leaves_qemu_as_it_was() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("unprotecting_loses_no_packet_and_leaves_qemu_as_it_was") else {
        return Ok(());
    };
    let mut lab = Lab::talking(&root)?;
    let before = settings(&mut lab.primary)?;
    // The same QEMU is protected several times, each time in the next generation.
    for channels in [0, 2, 1] {
        let side = lab.standby(channels)?;
        let protection = lab.protect(&side, None, wins())?;
        lab.wait_until_held(&side, &protection, 3)?;
        lab.network.hear_more(10)?;

        protection.unprotect().map_err(|error| error.to_string())?;
        let end = protection.finish().map_err(|error| error.to_string())?;

        assert_eq!(end.outcome, Outcome::Alone(Because::Never));
        assert!(end.runs_here && end.left.is_empty(), "{end:?}");
        assert!(side.asked.discarded.load(Ordering::SeqCst));
        lab.network.hear_more(20)?;
        drop(protection);
        assert_eq!(settings(&mut lab.primary)?, before);
    }
    Ok(())
}

#[test]
fn primary_goes_on_when_its_standby_is_killed_and_the_claim_is_won() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("primary_goes_on_when_its_standby_is_killed_and_the_claim_is_won") else {
        return Ok(());
    };
    let mut lab = Lab::talking(&root)?;
    let side = lab.standby(2)?;
    let claims = lab.directory.path().join("claims");
    std::fs::create_dir(&claims).map_err(|error| error.to_string())?;
    let spec: Spec = format!("file:{}", claims.display()).parse().map_err(|error| format!("{error}"))?;
    let arbiter = spec.open(Duration::from_secs(10)).map_err(|error| error.to_string())?.arbiter;
    let claim = Claim {
        guest: GuestName::of_id([7; 16]),
        generation: Generation::new(1),
        claimant: Claimant::of_this_process(Role::Primary),
    };
    let asks = move || match arbiter.claim(&claim) {
        Ok(sterna_arbiter::Ruling::Won) => Ok(Ruling::Won),
        Ok(_) => Ok(Ruling::Lost),
        Err(error) => Err(error.to_string()),
    };
    let protection = lab.protect(&side, None, Arc::new(asks))?;
    lab.wait_until_held(&side, &protection, 3)?;
    lab.network.hear_more(10)?;

    side.wire.cut();
    let end = protection.finish().map_err(|error| error.to_string())?;

    assert_eq!(end.outcome, Outcome::Alone(Because::Claim));
    assert!(end.left.is_empty(), "{end:?}");
    lab.network.hear_more(20)?;
    Ok(())
}

#[test]
fn silent_standby_does_not_hold_qemu_up_for_longer_than_the_lease() -> Result<(), Failure> {
    let test = "silent_standby_does_not_hold_qemu_up_for_longer_than_the_lease";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    for channels in [0, 2] {
        // This guest writes its memory at full speed.
        let mut lab = Lab::new(&root, Guest::Boot, &["-device", "e1000,netdev=n0"])?;
        lab.primary.wait_for_ticks(2)?;
        let side = lab.standby(channels)?;
        let lease = stretched(Duration::from_secs(3));
        let protection = lab.protect(&side, Some(lease), wins())?;
        lab.wait_until_held(&side, &protection, 3)?;

        side.wire.freeze_in_ram(100 << 10);
        wait("the frozen wire", || side.wire.is_frozen().then_some(()))?;
        let begin = Instant::now();
        lab.primary.execute("query-status", Value::Null)?;
        // The additional 20 s are for the host's scheduler and not part of the lease.
        assert!(begin.elapsed() < lease + Duration::from_secs(20), "{:?}", begin.elapsed());

        let end = protection.finish().map_err(|error| error.to_string())?;
        assert_eq!(end.outcome, Outcome::Alone(Because::Claim));
        lab.primary.wait_for_ticks(2)?;
    }
    Ok(())
}

#[test]
fn guest_whose_claim_is_lost_is_stopped_and_says_nothing_more() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("guest_whose_claim_is_lost_is_stopped_and_says_nothing_more") else {
        return Ok(());
    };
    for (lease, channels) in [(None, 0), (Some(Duration::from_secs(2)), 2)] {
        let mut lab = Lab::talking(&root)?;
        let side = lab.standby(channels)?;
        // With a short lease, the arbiter answers only after the end of the lease, when the guest is paused.
        let begin = Instant::now();
        let rules: Arc<dyn Claims> = Arc::new(move || match lease {
            Some(lease) if begin.elapsed() < lease * 3 => Err("not yet".to_owned()),
            _ => Ok(Ruling::Lost),
        });
        let protection = lab.protect(&side, lease, rules)?;
        lab.wait_until_held(&side, &protection, 3)?;
        lab.network.hear_more(5)?;

        side.wire.cut();
        let end = protection.finish().map_err(|error| error.to_string())?;

        assert_eq!(end.outcome, Outcome::Lost);
        assert!(!end.runs_here && end.left.is_empty(), "{end:?}");
        wait("QEMU's end", || lab.primary.ended())?;
        lab.network.hear_out()?;
        let held = side.take_over(&lab.directory.path().join("image"))?;
        assert!(held >= lab.network.last, "{held} is held, {} was heard", lab.network.last);
    }
    Ok(())
}

#[test]
fn stream_and_contact_go_through_tls_that_qemu_does_not_know_of() -> Result<(), Failure> {
    let test = "stream_and_contact_go_through_tls_that_qemu_does_not_know_of";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let directory = good_directory();
    let tls = |endpoint| {
        let credentials = TlsCredentials::from_directory(directory.path(), endpoint, true);
        let credentials = credentials.map_err(|error| error.to_string())?;
        Ok::<_, Failure>(Tls { hostname: Some("localhost".to_owned()), ..Tls::new(Arc::new(credentials)) })
    };
    let mut lab = Lab::talking(&root)?;
    let side = lab.standby_with(2, Some((tls(TlsEndpoint::Server)?, tls(TlsEndpoint::Client)?)))?;
    let protection = lab.protect(&side, None, wins())?;
    lab.wait_until_held(&side, &protection, 3)?;
    lab.network.hear_more(20)?;

    protection.unprotect().map_err(|error| error.to_string())?;
    let end = protection.finish().map_err(|error| error.to_string())?;

    assert_eq!(end.outcome, Outcome::Alone(Because::Never));
    lab.network.hear_more(20)?;
    drop(protection);
    // A client without the right certificate is refused.
    let side = lab.standby_with(2, Some((tls(TlsEndpoint::Server)?, tls(TlsEndpoint::Client)?)))?;
    let mut request = side.request(None);
    request.tls = None;
    let refused = lab.begin(request, wins()).map(drop).unwrap_err();
    assert!(refused.contains("QEMU's earlier settings are restored"), "{refused}");
    Ok(())
}

#[test]
fn nobody_claims_a_guest_that_is_gone() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("nobody_claims_a_guest_that_is_gone") else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let side = lab.standby(0)?;
    let asked = Arc::new(AtomicU64::new(0));
    let counts = Arc::clone(&asked);
    let claims = move || {
        counts.fetch_add(1, Ordering::SeqCst);
        Ok(Ruling::Won)
    };
    let protection = lab.protect(&side, None, Arc::new(claims))?;
    lab.wait_until_held(&side, &protection, 3)?;

    lab.primary.kill();

    let outcome = wait("the end of the protection", || protection.outcome())?;
    assert_eq!(outcome, Outcome::Lost, "the standby takes over");
    assert_eq!(asked.load(Ordering::SeqCst), 0);
    assert!(protection.is_qemu_gone());
    Ok(())
}

#[test]
fn guest_is_handed_over_as_planned() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("guest_is_handed_over_as_planned") else { return Ok(()) };
    for channels in [0, 2] {
        let mut lab = Lab::talking(&root)?;
        let side = lab.standby(channels)?;
        let protection = lab.protect(&side, None, wins())?;
        lab.wait_until_held(&side, &protection, 3)?;

        protection.hand_over().map_err(|error| error.to_string())?;
        let end = protection.finish().map_err(|error| error.to_string())?;

        assert_eq!(end.outcome, Outcome::HandedOver, "{:?}", protection.statistics());
        assert!(side.asked.started.load(Ordering::SeqCst));
        wait("QEMU's end", || lab.primary.ended())?;
        lab.network.hear_out()?;
        let last = side.standby.statistics().checkpoints;
        assert_eq!(protection.statistics().held, last, "the last of all is held");
        let image = lab.directory.path().join("image");
        side.take_over(&image)?;
        // The survivor repeats no frame.
        Lab::talks_on(&root, &image, lab.network.last)?;
        assert!(end.left.is_empty(), "{end:?}");
    }
    Ok(())
}

#[test]
fn guest_that_shares_a_disk_does_not_run_behind_its_last_checkpoint() -> Result<(), Failure> {
    let test = "guest_that_shares_a_disk_does_not_run_behind_its_last_checkpoint";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let shared =
        ["-blockdev", "null-co,node-name=s0,size=1048576", "-device", "virtio-blk-pci,drive=s0,id=shared"];
    let mut lab = Lab::new(&root, Guest::Talker, &shared)?;
    lab.network.hear_more(3)?;
    let side = lab.standby(0)?;
    let protection = lab.protect(&side, None, wins())?;
    assert!(protection.remarks().iter().any(|remark| remark.contains("s0")), "{:?}", protection.remarks());
    lab.wait_until_held(&side, &protection, 3)?;
    // The guest sends frames in the last epoch.
    side.tells.store(protection.statistics().held, Ordering::SeqCst);
    wait("output", || (protection.statistics().output.waiting > 5).then_some(()))?;

    protection.hand_over().map_err(|error| error.to_string())?;
    std::thread::sleep(Duration::from_millis(100));
    side.tells.store(u64::MAX, Ordering::SeqCst);
    let end = protection.finish().map_err(|error| error.to_string())?;

    assert_eq!(end.outcome, Outcome::HandedOver, "{:?}", protection.statistics());
    assert!(end.left.iter().any(|left| left.contains("delivered") && left.contains("shared")), "{end:?}");
    lab.network.hear_out()?;
    let held = side.take_over(&lab.directory.path().join("image"))?;
    assert!(held >= lab.network.last, "{held} is held, {} was heard", lab.network.last);
    Ok(())
}

#[test]
fn card_cannot_be_plugged_and_one_that_loses_its_gate_ends_the_protection_at_once() -> Result<(), Failure> {
    let test = "card_cannot_be_plugged_and_one_that_loses_its_gate_ends_the_protection_at_once";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let side = lab.standby(2)?;
    let protection = lab.protect(&side, None, wins())?;
    lab.wait_until_held(&side, &protection, 3)?;
    // The delay prevents a checkpoint, which would notice the change.
    lab.primary.parameters(json!({"x-checkpoint-delay": 600_000}))?;
    // `user` would add a section of its own. The checkpoint that the new delay requests would then be
    // refused.
    let [local, remote] =
        ["n9", "n9.other"].map(|name| lab.directory.path().join(name).display().to_string());
    let (local, remote) = (json!({"type": "unix", "path": local}), json!({"type": "unix", "path": remote}));
    lab.primary
        .execute("netdev_add", json!({"type": "dgram", "id": "n9", "local": local, "remote": remote}))?;
    let plugged = json!({"driver": "e1000", "netdev": "n9", "id": "plugged"});
    let refused = lab.primary.execute("device_add", plugged).unwrap_err();
    assert!(refused.contains("not allowed while migrating"), "{refused}");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(protection.statistics().ended_because, None);

    lab.primary.execute("object-del", json!({"id": "sterna-gate0-hold"}))?;

    let end = protection.finish().map_err(|error| error.to_string())?;
    let stood = (protection.statistics(), side.standby.state());
    assert_eq!(end.outcome, Outcome::Alone(Because::Never), "{stood:?}");
    let why = protection.statistics().ended_because.unwrap_or_default();
    assert!(why.contains("gate"), "{why}");
    assert!(end.runs_here && end.left.len() == 1, "it is said that the gate was gone: {end:?}");
    lab.network.forget();
    lab.network.hear_more(20)?;
    Ok(())
}

#[test]
fn seeding_that_fails_leaves_qemu_as_it_was() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("seeding_that_fails_leaves_qemu_as_it_was") else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let before = settings(&mut lab.primary)?;
    // The standby expects multifd channels, and the primary has none.
    let side = lab.standby(2)?;
    let mut request = side.request(None);
    request.channels = 0;
    let protection = lab.begin(request, wins())?;

    let end = protection.finish().map_err(|error| error.to_string())?;

    assert!(matches!(end.outcome, Outcome::Failed(Cause::ConnectionLost)), "{end:?}");
    assert!(end.runs_here && end.left.is_empty(), "{end:?}");
    lab.network.hear_more(10)?;
    drop(protection);
    assert_eq!(settings(&mut lab.primary)?, before);
    Ok(())
}

#[test]
fn seeding_that_qemu_gives_up_before_it_connects_has_an_end() -> Result<(), Failure> {
    let test = "seeding_that_qemu_gives_up_before_it_connects_has_an_end";
    let Some(root) = Root::qemu_for(test) else { return Ok(()) };
    let mut lab = Lab::talking(&root)?;
    let before = settings(&mut lab.primary)?;
    let side = lab.standby(2)?;
    let mut request = side.request(None);
    let sockets = lab.directory.path().join("sockets");
    std::fs::create_dir(&sockets).map_err(|error| error.to_string())?;
    request.socket_directory = Some(sockets.clone());
    // Simulates a cleanup of temporary files.
    let protection =
        lab.begin_and_before_migrate(request, wins(), move || std::fs::remove_dir_all(&sockets).unwrap())?;

    wait("an outcome", || protection.outcome())?;
    let end = protection.finish().map_err(|error| error.to_string())?;

    assert!(matches!(end.outcome, Outcome::Failed(Cause::ConnectionLost)), "{end:?}");
    assert!(end.runs_here && end.left.is_empty(), "{end:?}");
    let why = protection.statistics().lost_because.unwrap_or_default();
    assert!(why.contains("No such file or directory"), "{why}");
    lab.network.hear_more(10)?;
    drop(protection);
    assert_eq!(settings(&mut lab.primary)?, before);
    Ok(())
}

#[test]
fn what_cannot_be_protected_is_refused_and_nothing_is_changed() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("what_cannot_be_protected_is_refused_and_nothing_is_changed") else {
        return Ok(());
    };
    let mut lab = Lab::talking(&root)?;
    let before = settings(&mut lab.primary)?;
    let side = lab.standby(0)?;
    let refused = |lab: &Lab, change: &dyn Fn(&mut ProtectRequest)| {
        let mut request = side.request(None);
        change(&mut request);
        match lab.begin(request, wins()) {
            Ok(_) => Err("it was not refused".to_owned()),
            Err(why) => Ok(why),
        }
    };
    let why = refused(&lab, &|request| request.checkpoint_delay = Duration::ZERO)?;
    assert!(why.contains("at least 10 ms"), "{why}");
    let why = refused(&lab, &|request| {
        request.contact = Some(sterna::Address::Unix("/nonexistent/standby".into()));
    })?;
    assert!(why.contains("/nonexistent/standby"), "{why}");
    lab.primary.stop()?;
    let why = refused(&lab, &|_| ())?;
    assert!(why.contains("`paused`"), "{why}");
    lab.primary.resume()?;
    assert_eq!(settings(&mut lab.primary)?, before);
    lab.network.hear_more(5)?;
    Ok(())
}
