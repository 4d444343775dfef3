//! Many migrations at once through one pair of relays.

use std::time::Instant;

use serde_json::json;
use sterna_benches::Failure;
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::machines::Lab;
use sterna_benches::peer::Peer;

use crate::Args;
use crate::pair::Relay;

/// RAM of each guest, MiB.
const RAM_MIB: u64 = 64;
/// The buffer limit of each session, MiB.
const BUFFER_MIB: u64 = 64;

pub(crate) fn measure(args: &Args) -> Result<Vec<Goal>, Failure> {
    let lab = args.lab(None)?;
    let place = tempfile::tempdir().map_err(|error| error.to_string())?;
    let at = |kind: &str, number: usize| {
        format!("unix:{}", place.path().join(format!("{kind}{number}")).display())
    };
    let mut guests: Vec<(Peer, Peer)> =
        (0..args.many).map(|number| pair(&lab, &at("vm", number))).collect::<Result<_, _>>()?;
    let mut arguments = vec!["listen:tcp:127.0.0.1:0".to_owned()];
    arguments.extend((0..args.many).flat_map(|n| ["--route".to_owned(), format!("r{n}={}", at("vm", n))]));
    let destination = Relay::start(&lab, &arguments)?;
    let to = |number: usize| format!("{}/r{number}", destination.address);
    let mut arguments = vec![format!("listen:{}", at("in", 0)), "--to".to_owned(), to(0)];
    arguments
        .extend((1..args.many).flat_map(|n| ["--forward".to_owned(), format!("{}={}", at("in", n), to(n))]));
    let source = Relay::start(&lab, &arguments)?;

    let began = Instant::now();
    for (number, (one, _)) in guests.iter_mut().enumerate() {
        one.execute("migrate", json!({ "uri": at("in", number) }))?;
    }
    for (number, (one, other)) in guests.iter_mut().enumerate() {
        one.wait_until_completed()
            .and_then(|()| other.wait_until_completed())
            .map_err(|why| format!("guest {number}: {why}"))?;
    }
    let took = began.elapsed().as_secs_f64();
    let resident = source.most_resident_bytes().max(destination.most_resident_bytes()) >> 20;
    println!(
        "\n{} migrations of {RAM_MIB} MiB at once: {took:.2} s, a relay has at most {resident} MiB resident",
        args.many
    );
    Ok(vec![Goal::of(
        &format!("{} migrations at once: resident memory of a relay, MiB", args.many),
        resident as f64,
        &format!("all complete in {took:.1} s"),
        Bound::AtMost((args.many as u64 * BUFFER_MIB) as f64),
    )])
}

/// Two VMs of `sterna run`, which take less memory than QEMUs.
fn pair(lab: &Lab, listen: &str) -> Result<(Peer, Peer), Failure> {
    let vm = |more: &[&str]| {
        let mut arguments = vec!["--machine=process".to_owned(), format!("--ram={RAM_MIB}M")];
        arguments.extend(more.iter().map(|&one| one.to_owned()));
        lab.start_tide(arguments)
    };
    let mut source = vm(&["--pattern=random", "--rate=200"])?;
    let mut destination = vm(&["--incoming=defer"])?;
    for peer in [&mut source, &mut destination] {
        let on = ["events", "return-path"].map(|name| json!({"capability": name, "state": true}));
        peer.execute("migrate-set-capabilities", json!({ "capabilities": on }))?;
        peer.execute("migrate-set-parameters", json!({"max-bandwidth": 0}))?;
    }
    destination.execute("migrate-incoming", json!({ "uri": listen }))?;
    Ok((source, destination))
}
