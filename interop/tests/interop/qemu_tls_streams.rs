//! The engine over TLS with real QEMU. A guest moves from a QEMU into an image, and from the image into
//! another QEMU, with TLS on every channel. Its count must continue.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::{
    Address, Capabilities, Compression, Event, Observer, Outcome, Parameters, Tls, TlsCredentials,
    TlsEndpoint,
};
use sterna_opaque::{ImagePlan, SendOptions, receive, send};

use crate::certificates::{Authority, Wanted, directory_of, good_directory};
use serde_json::json;
use sterna_image::{Image, MappedOptions};
use sterna_interop::{Failure, Guest, Qemu, Root, unbroken};

fn tls(directory: &Path, endpoint: TlsEndpoint) -> Tls {
    let credentials = TlsCredentials::from_directory(directory, endpoint, true).expect("credentials");
    Tls { hostname: Some("localhost".to_owned()), ..Tls::new(Arc::new(credentials)) }
}

fn object(directory: &Path, endpoint: &str) -> String {
    format!("tls-creds-x509,id=tls0,dir={},endpoint={endpoint},verify-peer=on", directory.display())
}

/// The settings with which the guest is sent.
#[derive(Clone, Copy)]
struct Way {
    machine: &'static str,
    unix: bool,
    /// Number of multifd channels; 0: only the main channel.
    channels: u8,
    compression: Compression,
    return_path: bool,
}

const PLAIN: Way =
    Way { machine: "pc", unix: false, channels: 0, compression: Compression::None, return_path: true };

impl Way {
    fn engine(self, tls: Tls) -> (Parameters, Capabilities) {
        let parameters = Parameters {
            max_bandwidth_bytes: 0,
            multifd_channels: self.channels.max(1),
            multifd_compression: self.compression,
            tls: Some(tls),
            ..Parameters::default()
        };
        let (multifd, return_path) = (self.channels > 0, self.return_path);
        (parameters, Capabilities { multifd, return_path, ..Capabilities::default() })
    }

    fn set(self, qemu: &mut Qemu) -> Result<(), Failure> {
        if self.channels > 0 {
            qemu.capabilities(&["multifd"])?;
        }
        if self.return_path {
            qemu.capabilities(&["return-path"])?;
        }
        let compression = if self.compression == Compression::Zstd { "zstd" } else { "none" };
        qemu.parameters(json!({
            "multifd-channels": self.channels.max(1),
            "multifd-compression": compression,
            "downtime-limit": 10_000,
            "tls-creds": "tls0",
            "tls-hostname": "localhost",
        }))
    }

    fn place(self, image: &Path) -> Address {
        let at = if self.unix { format!("unix:{}.sock", image.display()) } else { "tcp:127.0.0.1:0".into() };
        at.parse().expect("an address")
    }
}

/// An observer that stores warnings.
#[derive(Default)]
struct Warnings(std::sync::Mutex<Vec<String>>);

impl Observer for Warnings {
    fn event(&self, event: &Event) {
        if let Event::Warning(text) = event {
            self.0.lock().expect("no panic").push(text.clone());
        }
    }
}

fn goes_through(name: &str, way: Way) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for(name) else { return Ok(()) };
    let directory = good_directory();
    let image = directory.path().join("image");
    let builder = Qemu::builder(&root).machine(way.machine).guest(Guest::Boot);
    let mut source = builder.clone().args(&["-object", &object(directory.path(), "client")]).spawn()?;
    let mut target =
        builder.incoming_defer().args(&["-object", &object(directory.path(), "server")]).spawn()?;
    way.set(&mut source)?;
    way.set(&mut target)?;
    source.wait_for_ticks(3)?;

    let plan = ImagePlan { path: image.clone(), options: MappedOptions::default(), convert: None };
    let (parameters, capabilities) = way.engine(tls(directory.path(), TlsEndpoint::Server));
    let receiving = receive(&way.place(&image), plan, parameters, capabilities, Arc::new(()))
        .map_err(|error| error.to_string())?;
    let sent = source.migrate(&receiving.address().to_string());
    let stored = receiving.wait();
    assert!(sent.is_ok() && stored.is_ok(), "{sent:?}; {stored:?}");

    let to = if way.unix {
        target.listen_on_unix()?
    } else {
        format!("tcp:127.0.0.1:{}", target.listen_on_tcp()?)
    };
    let (parameters, capabilities) = way.engine(tls(directory.path(), TlsEndpoint::Client));
    let stored = Image::open(&image).map_err(|error| error.to_string())?;
    let to: Address = to.parse().expect("an address");
    let sending = send(stored, &to, &SendOptions::default(), parameters, capabilities, Arc::new(()))
        .map_err(|error| error.to_string())?;
    let outcome = sending.wait();
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}; {}", target.log());
    target.wait_for_migration()?;

    target.wait_for_ticks(3)?;
    unbroken(&[&source, &target]).map(drop)
}

#[test]
fn guest_goes_through_an_image_over_tls_main_channel_alone() -> Result<(), Failure> {
    goes_through("guest_goes_through_an_image_over_tls_main_channel_alone", PLAIN)
}

#[test]
fn guest_goes_through_an_image_over_tls_multifd() -> Result<(), Failure> {
    let way = Way { channels: 4, machine: "q35", ..PLAIN };
    goes_through("guest_goes_through_an_image_over_tls_multifd", way)
}

#[test]
fn guest_goes_through_an_image_over_tls_without_return_path() -> Result<(), Failure> {
    let way = Way { channels: 2, return_path: false, ..PLAIN };
    goes_through("guest_goes_through_an_image_over_tls_without_return_path", way)
}

#[test]
fn guest_goes_through_an_image_over_tls_unix_sockets() -> Result<(), Failure> {
    let way = Way { channels: 3, unix: true, ..PLAIN };
    goes_through("guest_goes_through_an_image_over_tls_unix_sockets", way)
}

#[test]
fn qemu_source_with_other_files_leaves_no_image_and_runs_on() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("qemu_source_with_other_files_leaves_no_image_and_runs_on") else {
        return Ok(());
    };
    let (ours, theirs) = (good_directory(), directory_of("Stranger"));
    let image = ours.path().join("image");
    let builder = Qemu::builder(&root).args(&["-object", &object(theirs.path(), "client")]);
    let mut source = builder.spawn()?;
    PLAIN.set(&mut source)?;
    let plan = ImagePlan { path: image.clone(), options: MappedOptions::default(), convert: None };
    let (parameters, capabilities) = PLAIN.engine(tls(ours.path(), TlsEndpoint::Server));
    let warnings = Arc::new(Warnings::default());
    let at = PLAIN.place(&image);
    let receiving =
        receive(&at, plan, parameters, capabilities, warnings.clone()).map_err(|e| e.to_string())?;

    let heard = source.migrate(&receiving.address().to_string()).expect_err("it must be refused");

    assert_eq!(source.status()?, "running");
    // The source learns of the failure first. This side may report the reason a moment later.
    let said = || warnings.0.lock().expect("no panic").join("\n");
    let deadline = Instant::now() + Duration::from_secs(20);
    while said().is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(receiving);
    assert!(!image.exists());
    let warnings = said();
    assert!(warnings.contains("not issued by an authority in ca-cert.pem"), "{warnings}; {heard}");
    Ok(())
}

#[test]
fn image_to_a_qemu_with_other_files_is_refused_and_says_why() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("image_to_a_qemu_with_other_files_is_refused_and_says_why") else {
        return Ok(());
    };
    let directory = good_directory();
    let image = directory.path().join("image");
    let mut source = Qemu::builder(&root).guest(Guest::Boot).spawn()?;
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", image.display()))?;
    let theirs = tempfile::tempdir().expect("a directory");
    let authority = Authority::new("Test authority");
    authority.write(theirs.path());
    authority.issue(theirs.path(), &Wanted::default());
    let object = object(theirs.path(), "server");
    let mut target =
        Qemu::builder(&root).guest(Guest::Boot).incoming_defer().args(&["-object", &object]).spawn()?;
    PLAIN.set(&mut target)?;
    let to: Address = format!("tcp:127.0.0.1:{}", target.listen_on_tcp()?).parse().expect("an address");

    let (parameters, capabilities) = PLAIN.engine(tls(directory.path(), TlsEndpoint::Client));
    let stored = Image::open(&image).map_err(|error| error.to_string())?;
    let sending = send(stored, &to, &SendOptions::default(), parameters, capabilities, Arc::new(()))
        .map_err(|error| error.to_string())?;

    let Outcome::Failed { error, held: false } = sending.wait() else { panic!("it must be refused") };
    assert!(error.to_string().contains("not issued by an authority in ca-cert.pem"), "{error}");
    assert!(image.exists(), "the image is left as it is");
    Ok(())
}
