//! libvirt's control connection through whole relays: keep-alive messages while the network is away.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sterna_relay::relay::Notice;

use crate::whole::Pair;

/// A packet of libvirt's RPC without a payload.
fn packet(program: u32, procedure: u32, kind: u32) -> Vec<u8> {
    [28, program, 1, procedure, kind, 0, 0].into_iter().flat_map(u32::to_be_bytes).collect()
}

fn ping() -> Vec<u8> {
    packet(0x6b65_6570, 1, 2)
}

fn pong() -> Vec<u8> {
    packet(0x6b65_6570, 2, 2)
}

fn next(from: &mut UnixStream) -> Vec<u8> {
    from.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut bytes = vec![0; 28];
    from.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn keep_alive_messages_are_answered_at_both_ends_while_the_network_is_away_and_pass_otherwise() {
    let pair = Pair::start(|_, _| {});
    let (mut client, mut daemon) = pair.flow();
    let (call, reply) = (packet(0x2000_8086, 66, 0), packet(0x2000_8086, 66, 1));
    client.write_all(&call).unwrap();
    assert_eq!(next(&mut daemon), call);
    // With the network, the ends ask each other.
    client.write_all(&ping()).unwrap();
    assert_eq!(next(&mut daemon), ping());
    daemon.write_all(&pong()).unwrap();
    assert_eq!(next(&mut client), pong());

    pair.proxy.block(true);
    pair.wait_for_both("the loss", |notice| matches!(notice, Notice::Lost { .. }));
    for _ in 0..3 {
        client.write_all(&ping()).unwrap();
        assert_eq!(next(&mut client), pong());
        daemon.write_all(&ping()).unwrap();
        assert_eq!(next(&mut daemon), pong());
    }
    // Other packets wait for the network.
    daemon.write_all(&reply).unwrap();
    pair.proxy.block(false);

    assert_eq!(next(&mut client), reply);
    client.write_all(&call).unwrap();
    assert_eq!(next(&mut daemon), call, "no keep-alive message of the outage is passed on");
}

#[test]
fn several_control_connections_share_a_session() {
    let pair = Pair::start(|options, _| options.is_raw = false);
    let flows = [pair.flow_with(&packet(0x2000_8086, 66, 0)), pair.flow_with(&packet(0x2000_8086, 66, 0))];

    for (mut client, mut daemon) in flows {
        assert_eq!(next(&mut daemon).len(), 28);
        daemon.write_all(&pong()).unwrap();
        assert_eq!(next(&mut client), pong());
    }
}
