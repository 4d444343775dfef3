//! TCP over a link behaves as over a network: it needs the link's delay and rate, and survives
//! loss.
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use sterna_link::{Direction, Link, Shape};

/// Prints why a test cannot run here, in the form that the test command repeats.
#[allow(clippy::print_stderr, reason = "says what was skipped")]
fn skip(test: &str, why: &str) {
    eprintln!("SKIPPED {test}: {why}");
}

#[test]
fn tcp_over_a_link_takes_its_round_trip_and_its_rate() {
    let shape = Shape { bytes_per_second: 20_000_000, delay: Duration::from_millis(5), ..Shape::default() };
    let link = match Link::new(shape, sterna_testing::seed("link")) {
        Ok(link) => link,
        Err(why) => return skip("tcp_over_a_link", &why),
    };
    let listener = link.far().run(|| TcpListener::bind((link.far().address(), 0)).unwrap());
    let address = listener.local_addr().unwrap();

    let began = Instant::now();
    let mut sender = link.near().run(|| TcpStream::connect(address).unwrap());
    let (mut receiver, _) = listener.accept().unwrap();
    let connected = began.elapsed();
    let received = std::thread::scope(|scope| {
        let reading = scope.spawn(move || {
            let mut all = Vec::new();
            receiver.read_to_end(&mut all).map(|_| all.len())
        });
        sender.write_all(&vec![7; 4_000_000]).unwrap();
        drop(sender);
        reading.join().unwrap().unwrap()
    });

    assert_eq!(received, 4_000_000);
    assert!(connected >= Duration::from_millis(10), "{connected:?}: a round trip");
    assert!(began.elapsed() >= Duration::from_millis(200), "{:?}: no faster than the link", began.elapsed());
    assert!(link.delivered_bytes(Direction::There) > 4_000_000);
}
