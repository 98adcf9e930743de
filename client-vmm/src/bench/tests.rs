use super::*;

#[test]
fn devices_are_understood() {
    let plain = DeviceSpec::parse("socket=/run/a.sock").unwrap();
    assert_eq!(plain.socket, PathBuf::from("/run/a.sock"));
    assert_eq!((plain.doorbells, plain.shadow), (DoorbellAccess::Any, false));
    let full = DeviceSpec::parse("map=off,shadow=on,dma=messages,socket=a").unwrap();
    assert_eq!((full.doorbells, full.shadow), (DoorbellAccess::Posted, true));
    assert_eq!(full.sharing, Sharing::Messages);
    for wrong in ["", "map=on", "socket=", "socket=a,map=yes", "socket=a,fast", "socket=a,"] {
        assert!(DeviceSpec::parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn sizes_and_times_are_understood() {
    assert_eq!(parse_size("512"), Ok(512));
    assert_eq!(parse_size("4k"), Ok(4096));
    assert_eq!(parse_size("2M"), Ok(2 << 20));
    assert_eq!(parse_size("1g"), Ok(1 << 30));
    for wrong in ["", "k", "0", "4x", "-1", "99999999999999999999", "99999999999g"] {
        assert!(parse_size(wrong).is_err(), "{wrong}");
    }
    assert_eq!(parse_time("3s"), Ok(Duration::from_secs(3)));
    assert_eq!(parse_time("2"), Ok(Duration::from_secs(2)));
    assert_eq!(parse_time("250ms"), Ok(Duration::from_millis(250)));
    for wrong in ["", "0s", "s", "1h", "99999999s"] {
        assert!(parse_time(wrong).is_err(), "{wrong}");
    }
}
