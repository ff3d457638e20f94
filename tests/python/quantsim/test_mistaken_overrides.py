"""What people get wrong with overrides and globs: the message says what was got, what was expected, and what to write."""

import warnings

import pytest
from first_try import IMAGES, calibrated, network
from torch import nn

import qsim


def test_overrides_that_mean_something_else():
    with pytest.raises(TypeError, match=r"got the class Linear as pattern; expected a glob of names; for all of a type op_type='Linear'"):
        qsim.int8().override(nn.Linear, bits=4)
    with pytest.raises(TypeError, match=r"expected a glob for the type of an operation, such as 'Linear'"):
        qsim.int8().override(op_type=nn.Linear, bits=4)
    with pytest.raises(ValueError, match=r"Config.override: got nothing to change for 'head'; expected fields of a TensorSpec \(bits=4\)"):
        qsim.int8().override("head")


class TestFieldsOverNone:
    def test_fields_of_one_role_start_from_int8(self):
        sim = calibrated(qsim.Config(activation=None).override("0", activation={"bits": 4}))
        assert [key for key in sim.quantizers() if not key.endswith(".weight")] == ["0.output"]
        assert sim.quantizers()["0.output"].spec == qsim.TensorSpec(bits=4)

    def test_over_an_earlier_override(self):
        sim = calibrated(qsim.int8().override("*", activation=None).override("0", activation={"method": "mse"}))
        assert sim.quantizers()["0.output"].spec == qsim.TensorSpec(method="mse")

    def test_fields_for_both_roles_start_nothing(self):
        sim = calibrated(qsim.Config(activation=None).override("0", bits=4))
        assert list(sim.quantizers()) == ["0.weight", "4.weight"]

    def test_what_the_target_leaves_in_float_stays_so(self):
        rules = (qsim.Override("4", activation=None),)
        profile = qsim.Profile("mine", rules=rules)
        config = qsim.Config(activation=None, target=profile).override("*", activation={"bits": 4})
        assert config.spec_for("4", "linear", "activation") is None
        assert config.spec_for("0", "conv2d", "activation").bits == 4

    def test_json(self):
        config = qsim.Config(activation=None).override("0", activation={"bits": 4})
        assert qsim.Config.from_json(config.to_json()) == config


class TestNamesOfOverrides:
    @pytest.mark.parametrize(
        ("pattern", "says"),
        [
            ("body", "names a part of the model, no operation; for all in it write 'body.*'"),
            ("hed", "matches no operation; close to it: 'head'"),
            ("haed", "matches no operation; close to it: 'head'"),
            ("boddy.*", "matches no operation; close to it: 'body.*'"),
            ("bod.*", "matches no operation; close to it: 'body.*'"),
            ("haed*", "matches no operation; close to it: 'head*'"),
            ("*haed", "matches no operation; close to it: '*head'"),
            ("bdoy.[0-3]", "matches no operation; close to it: 'body.[0-3]'"),
            ("head.weight", "write its operation and role: override('head', weight=...)"),
            ("head.output", "write its operation and role: override('head', activation=...)"),
        ],
    )
    def test_a_mistyped_one_is_an_error(self, pattern, says):
        model = nn.Sequential()
        model.add_module("body", network()[:4])
        model.add_module("head", nn.Linear(8, 4))
        with pytest.raises(ValueError, match="QuantSim: the override") as caught:
            qsim.QuantSim(model, IMAGES, qsim.int8().override(pattern, bits=4))
        assert says in str(caught.value)

    def test_a_mistyped_type_is_an_error(self):
        with pytest.raises(ValueError, match=r"the override '\*' \(op_type='Cnov'\) matches no operation; close to its type: 'Conv'"):
            qsim.QuantSim(network(), IMAGES, qsim.int8().override(op_type="Cnov", bits=4))
        with pytest.warns(UserWarning, match="matches no operation"):  # a type, but none that is here
            qsim.QuantSim(network(), IMAGES, qsim.int8().override(op_type="conv3d", bits=4))

    def test_other_names_that_match_nothing(self):
        model = nn.Sequential()
        model.add_module("body", nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten()))
        model.add_module("head", nn.LazyLinear(4))
        model(IMAGES)
        model.eval()
        with pytest.warns(
            UserWarning, match=r"'bdoy\.\*' in the config's batch_norm matches no BatchNorm; close to it: 'body\.\*'"
        ) as caught:
            sim = qsim.QuantSim(model, IMAGES, qsim.Config(batch_norm={"*": "keep", "bdoy.*": "fold"}))
        assert [warning.filename for warning in caught] == [__file__]
        for call in (sim.disable, sim.enable, sim.fallback):
            with pytest.raises(ValueError, match=r"matches 'haed\*'; close to it: 'head\*'"):
                call("haed*")
        with pytest.raises(ValueError, match=r"no BatchNorm matches 'bdoy\*'; close to it: 'body\*'"):
            sim.freeze_batch_norms("bdoy*")

    def test_any_other_is_warned_of_once(self):
        with pytest.warns(UserWarning, match="the config's override 'classifier.*' matches no operation") as caught:
            sim = qsim.QuantSim(network(), IMAGES, qsim.int8().override("classifier.*", bits=4))
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert "the config's override 'classifier.*' matches no operation" in sim.notes

    def test_what_fits_is_not_told_of(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            qsim.QuantSim(network(), IMAGES, qsim.int8().override("4", bits=4).override(op_type="Conv", bits=4))
