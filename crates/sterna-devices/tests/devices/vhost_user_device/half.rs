//! Tests of a back end that completes only a part of a start. Whether it serves the ring is unknown until it
//! is asked.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use sterna::DeviceStream;
use sterna_devices::vhost_user::{VhostUserDevice, VhostUserOptions};
use tempfile::TempDir;
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};

use super::machine::{RING, SLOTS, ram, whole};
use crate::back_end::VERSION_1;
use crate::virtqueue::Virtqueue;

const GET_FEATURES: u32 = 1;
const SET_LOG_BASE: u32 = 6;
const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_VRING_ENABLE: u32 = 18;
const SET_DEVICE_STATE_FD: u32 = 42;
/// Position of its ring, independent of the requests.
const BASE: u32 = 7;

/// A request, and the second word of its body.
pub type Asked = (u32, u32);

/// Listens at `path` for one connection and refuses the first request `refused`, if given. Returns the
/// received requests. It accesses neither RAM nor the log.
pub fn listen(path: &Path, refused: Option<u32>) -> Receiver<Asked> {
    let listener = UnixListener::bind(path).expect("a socket");
    let (tell, asked) = channel();
    thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a connection");
        serve(stream, refused, &tell);
    });
    asked
}

fn serve(mut stream: UnixStream, refused: Option<u32>, tell: &Sender<Asked>) {
    let mut refuses = true;
    let mut head = [0; 12];
    while stream.read_exact(&mut head).is_ok() {
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let (request, flags, size) = (word(&head[..4]), word(&head[4..8]), word(&head[8..]));
        let mut body = vec![0; size as usize];
        stream.read_exact(&mut body).expect("a whole message");
        // Fails if the test no longer receives.
        let _ = tell.send((request, body.get(4..8).map_or(0, word)));
        let answer = match request {
            GET_FEATURES => Some(
                VERSION_1
                    | VhostUserVirtioFeatures::LOG_ALL.bits()
                    | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(),
            ),
            GET_PROTOCOL_FEATURES => {
                let all = VhostUserProtocolFeatures::LOG_SHMFD
                    | VhostUserProtocolFeatures::REPLY_ACK
                    | VhostUserProtocolFeatures::DEVICE_STATE;
                Some(all.bits())
            }
            GET_VRING_BASE => Some(u64::from(BASE) << 32),
            SET_LOG_BASE => Some(0),
            // Success, without a descriptor of its own.
            SET_DEVICE_STATE_FD => Some(0x100),
            _ if flags & 8 == 0 => None,
            _ if Some(request) == refused && std::mem::take(&mut refuses) => Some(1),
            _ => Some(0),
        };
        if let Some(answer) = answer {
            let parts = [&request.to_le_bytes()[..], &5u32.to_le_bytes(), &8u32.to_le_bytes()];
            let reply = [&parts.concat()[..], &answer.to_le_bytes()].concat();
            stream.write_all(&reply).expect("somebody who listens");
        }
    }
}

/// A device whose start was refused at `refused`, and its back end's later requests.
fn half_started(directory: &TempDir, refused: u32) -> (std::sync::Arc<VhostUserDevice>, Receiver<Asked>) {
    let path = directory.path().join("half");
    let asked = listen(&path, Some(refused));
    let limit = Duration::from_secs(60);
    let options = VhostUserOptions { answer_limit: limit, ..VhostUserOptions::new("fs0", &path) };
    let device = VhostUserDevice::connect(options, &ram(), &[whole()]).expect("a device");
    let started = device.start(VERSION_1, &[Virtqueue::new(RING, SLOTS).ring()]);
    let error = started.expect_err("half a start").to_string();
    assert!(error.contains("fs0"), "{error}");
    while asked.try_recv().is_ok() {}
    (device, asked)
}

#[test]
fn run_after_a_start_that_failed_half_way_asks_how_far_the_ring_got_and_sets_it_up_again() {
    for refused in [SET_VRING_KICK, SET_VRING_ENABLE] {
        let directory = TempDir::new().expect("a directory");
        let (device, asked) = half_started(&directory, refused);

        device.run().expect("a good start");

        let asked: Vec<_> = asked.try_iter().collect();
        let place = |request| asked.iter().position(|asked| asked.0 == request);
        let (stopped, set) = (place(GET_VRING_BASE), place(SET_VRING_BASE));
        assert!(stopped.is_some() && stopped < set, "{asked:?}");
        assert!(asked.contains(&(SET_VRING_BASE, BASE)), "{asked:?}");
        assert!(set < place(SET_VRING_ENABLE), "{asked:?}");
    }
}

#[test]
fn stop_after_a_start_that_failed_half_way_stops_the_ring() {
    for refused in [SET_VRING_KICK, SET_VRING_ENABLE] {
        let directory = TempDir::new().expect("a directory");
        let (device, asked) = half_started(&directory, refused);

        device.stop().expect("a good stop");

        assert!(asked.try_iter().any(|asked| asked.0 == GET_VRING_BASE));
        device.configuration().expect("its rings stand still");
    }
}
